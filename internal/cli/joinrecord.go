//go:build linux

package cli

import (
	"cmp"
	"errors"
	"io/fs"
	"path/filepath"
	"slices"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/host/joining"
)

// joined identifies a join.
type joined struct {
	Server string `json:"server"`
	// TokenID is the id of the token, which is not secret.
	TokenID string          `json:"tokenID"`
	Request joining.Request `json:"request"`
}

// joinRecord is the record of the join of this host, for `capstan host leave`. It is written before the first change of the
// host, and removed last.
type joinRecord struct {
	joined
	// Unfinished is true until the host has its first certificate.
	Unfinished bool `json:"unfinished,omitempty"`
	// Options that the join added to the file with the options of the unit. nil: a version of Capstan joined that did not record
	// them.
	Options []option `json:"options"`
	// MadeDefaults is true if the file did not exist before.
	MadeDefaults bool `json:"madeDefaults,omitempty"`
}

// joinedFile is the name of the record, in the folder of the certificates.
const joinedFile = "join.json"

// readJoinRecord returns the record of a folder, or nil if its host has not joined.
func readJoinRecord(dir string) (*joinRecord, error) {
	record := &joinRecord{}
	err := atomicfile.ReadJSON(filepath.Join(dir, joinedFile), record)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return record, err
}

func (r joinRecord) write(dir string) error {
	return atomicfile.WriteJSON(filepath.Join(dir, joinedFile), r, 0o600)
}

// beginJoin makes sure that there is a record, before the join changes anything. The record of an earlier join stays until this
// one has its certificate.
func beginJoin(dir string, want joined) error {
	record, err := readJoinRecord(dir)
	if err != nil || record != nil && !record.Unfinished {
		return err
	}
	return joinRecord{joined: want, Unfinished: true}.write(dir)
}

// joinedElsewhere reports whether the host has joined at another URL.
func joinedElsewhere(dir, server string) (bool, error) {
	record, err := readJoinRecord(dir)
	return record != nil && !record.Unfinished && record.Server != server, err
}

// finishJoin records that the host has the certificate.
func finishJoin(dir string, made joined) error {
	record, err := readJoinRecord(dir)
	if err != nil {
		return err
	}
	next := *cmp.Or(record, &joinRecord{})
	next.joined, next.Unfinished = made, false
	return next.write(dir)
}

// checkDefaults returns an error if capstand.service has other values for options of a join.
func checkDefaults(dir, defaults string, options []option) error {
	former, err := formerOptions(dir)
	if err != nil {
		return err
	}
	if _, _, err := otherDefaults(defaults, former, options); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// formerOptions returns the options that the last join has added.
func formerOptions(dir string) ([]option, error) {
	record, err := readJoinRecord(dir)
	return cmp.Or(record, &joinRecord{}).Options, err
}

// configure gives capstand.service the options of a join.
func configure(dir, defaults string, options []option) error {
	former, err := formerOptions(dir)
	if err != nil {
		return err
	}
	return setDefaults(defaults, former, options, func(before string, exists bool) error { return recordDefaults(dir, before, exists, options) })
}

// recordDefaults records the options that a join is about to add to the file with the options of the unit.
func recordDefaults(dir, content string, exists bool, options []option) error {
	record, err := readJoinRecord(dir)
	if err != nil || record == nil {
		return err
	}
	if record.Options == nil {
		record.Options = []option{} // known, and none
	}
	for _, o := range missingOptions(content, options) {
		if !slices.Contains(record.Options, o) {
			record.Options = append(record.Options, o)
		}
	}
	record.MadeDefaults = record.MadeDefaults || !exists
	return record.write(dir)
}
