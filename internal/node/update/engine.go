// Package update changes a running machine in place: its Kubernetes version, the configuration of its services, and files.
//
// PID 1 starts `capstan-init node update` when capstand has written a request, and again when that process ends before the
// update has ended. The update is a sequence of steps. Each step can be repeated, and each finished step is recorded in a
// journal on the machine's disk, so the next process continues at the first missing step, also after a restart of the
// machine. The files that the update can change are copied before the first change. If a step fails, or the engine is killed
// too often in one step, the files are restored, and the services run as before.
//
// Layer: node. Allowed imports: api, library, contract.
package update

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"unicode/utf8"

	"capstan.dev/capstan/internal/machineapi"
)

// maxAttempts is the number of ends of the engine in one step before the step counts as failed.
const maxAttempts = 5

// maxMessage bounds the message of an update, in bytes.
const maxMessage = 1024

// step is a part of an update. It can be repeated from its start.
type step struct {
	name string
	do   func(context.Context) error
}

// plan is the sequence of steps of an update, and those of its rollback.
type plan struct {
	steps []step
	// changes is the name of the first step that changes the machine. If a step before it fails, nothing needs to be undone.
	changes string
	undo    []step
	// forget removes the files that only an unfinished update needs. It comes after the result was recorded.
	forget func() error
	// running returns an error if the machine ends. Its processes die one after the other, so a step can fail because
	// another process is already dead, before the engine itself is killed.
	running func(context.Context) error
}

// engine carries out a plan.
type engine struct {
	path string // of the journal
	plan plan
	log  *slog.Logger
}

// run carries out the update, or continues it. It returns nil when the update has a result, also if it was rolled back.
func (e *engine) run(ctx context.Context, id string) error {
	j, err := loadJournal(e.path, id)
	if err != nil {
		return err
	}
	if j.ended() {
		return e.plan.forget()
	}
	j.Attempts++
	if err := j.save(e.path); err != nil {
		return err
	}
	if !j.undoing() {
		err := e.do(ctx, j, e.plan.steps, &j.Done)
		if err == nil {
			return e.end(j, machineapi.UpdateSucceeded, "")
		}
		if interrupted := e.interrupted(ctx); interrupted != nil {
			return errors.Join(interrupted, err)
		}
		e.log.Error("The update failed and is rolled back", "step", j.Step, "error", err)
		if !e.changed(j) {
			return e.end(j, machineapi.UpdateRolledBack, "nothing was changed: "+err.Error())
		}
		j.Cause, j.Attempts = bounded(fmt.Sprintf("step %q failed: %v", j.Step, err)), 1
	}
	err = e.do(ctx, j, e.plan.undo, &j.Undone)
	if err != nil {
		if interrupted := e.interrupted(ctx); interrupted != nil {
			return errors.Join(interrupted, err)
		}
		return e.end(j, machineapi.UpdateFailed, fmt.Sprintf("the rollback failed in step %q: %v; it became necessary because %s", j.Step, err, j.Cause))
	}
	return e.end(j, machineapi.UpdateRolledBack, j.Cause)
}

// interrupted returns an error if a failure does not count, because the engine or the machine ends. The next process repeats
// the step.
func (e *engine) interrupted(ctx context.Context) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err := e.plan.running(ctx); err != nil {
		return fmt.Errorf("the machine ends, so the step counts as interrupted: %w", err)
	}
	return nil
}

// changed returns whether a step that changes the machine has begun. Another build of the engine can have done steps that are in another order
// here, or that do not exist here.
func (e *engine) changed(j *journal) bool {
	index := func(name string) int {
		return slices.IndexFunc(e.plan.steps, func(s step) bool { return s.name == name })
	}
	return slices.ContainsFunc(append([]string{j.Step}, j.Done...), func(name string) bool {
		at := index(name)
		return name != "" && (at < 0 || at >= index(e.plan.changes))
	})
}

// do carries out the steps that are not in the record. Each is recorded before and after.
func (e *engine) do(ctx context.Context, j *journal, steps []step, done *[]string) error {
	for _, s := range steps {
		if slices.Contains(*done, s.name) {
			continue
		}
		if j.Step != s.name {
			j.Step, j.Attempts = s.name, 1
		}
		j.Phase, j.Message, j.RollingBack = machineapi.UpdateRunning, "", j.undoing()
		if j.undoing() {
			j.Message = bounded("is rolled back: " + j.Cause)
		}
		if err := j.save(e.path); err != nil {
			return err
		}
		if j.Attempts > maxAttempts {
			return fmt.Errorf("capstan-init ended %d times in this step; see /var/log/capstan/update.log", maxAttempts)
		}
		e.log.Info("Update", "id", j.ID, "step", s.name)
		if err := s.do(ctx); err != nil {
			return err
		}
		*done, j.Attempts = append(*done, s.name), 1
		if err := j.save(e.path); err != nil {
			return err
		}
	}
	return nil
}

// end records the result and removes the remains of the update.
func (e *engine) end(j *journal, phase machineapi.UpdatePhase, message string) error {
	j.Phase, j.Message, j.RollingBack = phase, bounded(message), false
	if phase == machineapi.UpdateSucceeded {
		j.Step = ""
	}
	if err := j.save(e.path); err != nil {
		return err
	}
	e.log.Info("Update ended", "id", j.ID, "phase", phase, "message", j.Message)
	return e.plan.forget()
}

// bounded returns text as one line of at most maxMessage bytes.
func bounded(text string) string {
	text = strings.Join(strings.Fields(strings.ToValidUTF8(text, " ")), " ")
	if len(text) <= maxMessage {
		return text
	}
	cut := maxMessage
	for !utf8.RuneStart(text[cut]) {
		cut--
	}
	return text[:cut]
}
