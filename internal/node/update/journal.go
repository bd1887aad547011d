package update

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/machineapi"
)

// journal is the record of an update, on the machine's disk. It has no content of the data.
type journal struct {
	machineapi.Update

	// Done are the finished steps of the update, Undone those of its rollback.
	Done   []string `json:"done,omitempty"`
	Undone []string `json:"undone,omitempty"`
	// Cause is the reason of the rollback; empty before it.
	Cause string `json:"cause,omitempty"`
	// Attempts counts the starts of the engine since the last finished step.
	Attempts int `json:"attempts,omitempty"`
}

// ended returns whether the update has its result.
func (j *journal) ended() bool {
	return j.Phase == machineapi.UpdateSucceeded || j.Phase == machineapi.UpdateRolledBack || j.Phase == machineapi.UpdateFailed
}

func (j *journal) undoing() bool { return j.Cause != "" }

// loadJournal returns the journal of an update, and an empty one if the last update was another one. A journal that cannot be
// read is an error: without it, a rollback could not restore the right files.
func loadJournal(path, id string) (*journal, error) {
	j := &journal{}
	if err := atomicfile.ReadJSON(path, j); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if j.ID != id {
		*j = journal{Update: machineapi.Update{ID: id, Phase: machineapi.UpdateRunning}}
	}
	return j, nil
}

func (j *journal) save(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	return atomicfile.WriteJSON(path, j, 0o600)
}
