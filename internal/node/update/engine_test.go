package update

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/testenv/expect"
)

var (
	errKilled = errors.New("killed")
	errEnding = errors.New("PID 1 does not answer")
)

// world is a machine with three steps that change values in a file each, and a copy of them.
type world struct {
	t   *testing.T
	dir string
	// dieAt is the place where the process is killed: "before X", "in X" or "after X"; deaths counts them.
	dieAt  string
	deaths int
	// machineDies is true if PID 1 dies first: the engine sees an error before it is killed. ending is true from then on.
	machineDies, ending bool
	// fail is the name of a step that returns an error.
	fail   string
	ran    []string
	cancel context.CancelFunc
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, dir: t.TempDir()}
	for _, name := range []string{"one", "two", "three"} {
		w.write(name, "old")
	}
	return w
}

func (w *world) write(name, text string) {
	w.t.Helper()
	if err := os.WriteFile(filepath.Join(w.dir, name), []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) files() string {
	var out []string
	for _, name := range []string{"one", "two", "three"} {
		data, _ := os.ReadFile(filepath.Join(w.dir, name))
		out = append(out, string(data))
	}
	return strings.Join(out, " ")
}

// die ends the process if this is the place: as after SIGKILL, nothing more is written.
func (w *world) die(place string) error {
	if w.dieAt != place || w.deaths == 0 {
		return nil
	}
	w.deaths--
	if w.machineDies {
		w.ending = true
	} else {
		w.cancel()
	}
	return errKilled
}

func (w *world) snapshot() snapshot {
	return snapshot{root: w.dir, dir: filepath.Join(w.dir, "copies")}
}

func (w *world) step(name string, do func() error) step {
	return step{name, func(context.Context) error {
		if err := w.die("before " + name); err != nil {
			return err
		}
		w.ran = append(w.ran, name)
		if name == w.fail {
			return errors.New("does not work")
		}
		if err := do(); err != nil {
			return err
		}
		return w.die("after " + name)
	}}
}

func (w *world) plan() plan {
	set := func(name string) step {
		return w.step(name, func() error {
			w.write(name, "half")
			if err := w.die("in " + name); err != nil {
				return err
			}
			w.write(name, "new")
			return nil
		})
	}
	return plan{
		steps: []step{
			w.step("check", func() error { return nil }),
			w.step("save", func() error { return w.snapshot().take([]string{"/one", "/two", "/three"}) }),
			set("one"), set("two"), set("three"),
		},
		changes: "one",
		undo:    []step{w.step("restore", func() error { return w.snapshot().restore() }), w.step("healthy", func() error { return nil })},
		forget:  func() error { return w.snapshot().remove() },
		running: w.running,
	}
}

func (w *world) running(context.Context) error {
	if w.ending {
		return errEnding
	}
	return nil
}

func (w *world) journal() string { return filepath.Join(w.dir, "journal.json") }

// process runs the engine once, as one process.
func (w *world) process(id string) error {
	ctx, cancel := context.WithCancel(w.t.Context())
	defer cancel()
	w.cancel, w.ending = cancel, false
	return (&engine{path: w.journal(), plan: w.plan(), log: slog.New(slog.DiscardHandler)}).run(ctx, id)
}

// run starts processes until one of them ends on its own, as PID 1 does.
func (w *world) run(id string) *journal {
	w.t.Helper()
	for range 50 {
		if err := w.process(id); err == nil {
			j := &journal{}
			if err := atomicfile.ReadJSON(w.journal(), j); err != nil {
				w.t.Fatal(err)
			}
			return j
		} else if !errors.Is(err, context.Canceled) && !errors.Is(err, errEnding) {
			w.t.Fatal(err)
		}
	}
	w.t.Fatal("the update does not end")
	return nil
}

func places(steps ...string) (all []string) {
	for _, name := range steps {
		all = append(all, "before "+name, "in "+name, "after "+name)
	}
	return append(all, "nowhere")
}

// A process that is killed anywhere, alone or with its machine, is continued by the next one, and no finished step runs again.
func TestKilledAnywhere(t *testing.T) {
	for _, place := range places("check", "save", "one", "two", "three") {
		for _, machineDies := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, machine dies %v", place, machineDies), func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				w.dieAt, w.deaths, w.machineDies = place, 2, machineDies
				j := w.run("u")
				for _, s := range w.plan().steps {
					runs := len(slices.DeleteFunc(slices.Clone(w.ran), func(name string) bool { return name != s.name }))
					if killed := strings.HasSuffix(place, " "+s.name); runs != 1 && !killed {
						t.Errorf("step %s ran %d times", s.name, runs)
					}
				}
				if j.Phase != machineapi.UpdateSucceeded || w.files() != "new new new" || j.Message != "" || j.Step != "" {
					t.Errorf("%s %q, files %s", j.Phase, j.Message, w.files())
				}
				if _, err := os.Stat(filepath.Join(w.dir, "copies")); err == nil {
					t.Error("the copies are left")
				}
				w.ran = nil
				if again := w.run("u"); again.Phase != machineapi.UpdateSucceeded || len(w.ran) > 0 {
					t.Errorf("an ended update did %v again", w.ran)
				}
			})
		}
	}
}

// A failed step is rolled back, wherever the process is killed before, during and after the rollback.
func TestRollbackKilledAnywhere(t *testing.T) {
	for _, fail := range []string{"one", "two", "three"} {
		for _, place := range places("save", "one", "two", "three", "restore", "healthy") {
			for _, machineDies := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s fails, killed %s, machine dies %v", fail, place, machineDies), func(t *testing.T) {
					t.Parallel()
					w := newWorld(t)
					w.fail, w.dieAt, w.deaths, w.machineDies = fail, place, 2, machineDies
					j := w.run("u")
					if j.Phase != machineapi.UpdateRolledBack || w.files() != "old old old" || !strings.Contains(j.Message, `step "`+fail+`" failed: does not work`) {
						t.Errorf("%s %q, files %s", j.Phase, j.Message, w.files())
					}
				})
			}
		}
	}
}

// A step in which the process ends again and again counts as failed. Other steps start with a new count.
func TestKilledTooOften(t *testing.T) {
	w := newWorld(t)
	w.dieAt, w.deaths = "in two", 100
	j := w.run("u")
	if j.Phase != machineapi.UpdateRolledBack || w.files() != "old old old" || !strings.Contains(j.Message, "ended 5 times") {
		t.Errorf("%s %q, files %s", j.Phase, j.Message, w.files())
	}
	if starts := len(slices.DeleteFunc(w.ran, func(s string) bool { return s != "two" })); starts != maxAttempts {
		t.Errorf("the step was started %d times, want %d", starts, maxAttempts)
	}
}

func TestNothingChanged(t *testing.T) {
	for _, fail := range []string{"check", "save"} {
		w := newWorld(t)
		w.fail = fail
		j := w.run("u")
		if j.Phase != machineapi.UpdateRolledBack || !strings.HasPrefix(j.Message, "nothing was changed: ") || j.Step != fail || slices.Contains(w.ran, "restore") {
			t.Errorf("%s: %+v, ran %v", fail, j, w.ran)
		}
	}
}

// Another build had done the step that changes the machine, and a step that this build does not have. This build has an earlier step first.
func TestChangedByAnotherBuild(t *testing.T) {
	for _, done := range []string{"one", "removed"} {
		w := newWorld(t)
		w.fail = "check"
		w.write("one", "new")
		expect.NoError(t, w.snapshot().take([]string{"/one", "/two", "/three"}))
		expect.NoError(t, (&journal{Update: machineapi.Update{ID: "u", Step: "two"}, Done: []string{done}}).save(w.journal()))
		if j := w.run("u"); strings.Contains(j.Message, "nothing was changed") || !slices.Contains(w.ran, "restore") {
			t.Errorf("%s: %+v, ran %v", done, j, w.ran)
		}
	}
}

func TestRollbackFails(t *testing.T) {
	w := newWorld(t)
	w.fail = "healthy"
	plan := w.plan()
	plan.steps[3] = step{"two", func(context.Context) error { return errors.New("broken") }}
	if err := (&engine{path: w.journal(), plan: plan, log: slog.New(slog.DiscardHandler)}).run(t.Context(), "u"); err != nil {
		t.Fatal(err)
	}
	j := &journal{}
	if err := atomicfile.ReadJSON(w.journal(), j); err != nil || j.Phase != machineapi.UpdateFailed || !strings.Contains(j.Message, `rollback failed in step "healthy"`) || !strings.Contains(j.Message, "broken") {
		t.Errorf("%+v, %v", j, err)
	}
}

// The journal of the last update is replaced by that of the next one; a damaged one stops the update.
func TestJournal(t *testing.T) {
	w := newWorld(t)
	w.fail = "two"
	w.run("u")
	w.fail = ""
	if j := w.run("v"); j.ID != "v" || j.Phase != machineapi.UpdateSucceeded || w.files() != "new new new" {
		t.Errorf("%+v", j)
	}
	w.write("journal.json", "{")
	if err := w.process("w"); err == nil {
		t.Error("an update with a damaged journal began")
	}
}

func TestBounded(t *testing.T) {
	long := strings.Repeat("ä", maxMessage)
	for text, want := range map[string]int{"a\n b\xff": len("a b"), long: maxMessage} {
		if got := bounded(text); len(got) != want {
			t.Errorf("%q has %d bytes, want %d", got, len(got), want)
		}
	}
}
