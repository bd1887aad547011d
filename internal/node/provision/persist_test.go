package provision

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"capstan.dev/capstan/internal/node/initapi"
)

func TestRanks(t *testing.T) {
	got := ranks([]initapi.Service{
		{Name: "a", State: initapi.StateWaiting}, {Name: "b", State: initapi.StateStarting}, {Name: "c", State: initapi.StateRunning},
		{Name: "d", State: initapi.StateReady}, {Name: "e", State: initapi.StateBackoff, Restarts: 7}, {Name: "f", State: initapi.StateStopped},
	})
	if diff := cmp.Diff(map[string]int{"a": 1, "b": 2, "c": 3, "d": 4, "e": 0, "f": 0}, got); diff != "" {
		t.Error(diff)
	}
}

// slowStart is a machine whose API server changes its state at times after the start.
type slowStart struct {
	begun    time.Time
	states   map[time.Duration]initapi.State
	reported []string
}

func (m *slowStart) watch(ctx context.Context, see func(initapi.Status) bool) error {
	changes := make(chan initapi.State)
	for after, state := range m.states {
		time.AfterFunc(after-time.Since(m.begun), func() {
			select {
			case changes <- state:
			case <-ctx.Done():
			}
		})
	}
	for {
		select {
		case state := <-changes:
			see(initapi.Status{Services: []initapi.Service{{Name: "kube-apiserver", State: state}}})
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (m *slowStart) report(_ context.Context, reason string) error {
	m.reported = append(m.reported, time.Since(m.begun).String()+" "+reason)
	return nil
}

// TestPersistence: a start has time while a service makes progress. One that stalls is reported and tried on, and it is never
// final (IM-08). Restarts are no progress, and an error of the start itself ends it.
func TestPersistence(t *testing.T) {
	broken := errors.New("exit code 7")
	for name, test := range map[string]struct {
		states   map[time.Duration]initapi.State
		ends     time.Duration
		err      error
		reported []string
		attempts int
	}{
		"slow with progress": {
			map[time.Duration]initapi.State{9 * time.Minute: initapi.StateStarting, 18 * time.Minute: initapi.StateReady},
			27 * time.Minute, nil, nil, 1,
		},
		"stalls and succeeds": {
			map[time.Duration]initapi.State{time.Minute: initapi.StateStarting, 15 * time.Minute: initapi.StateReady},
			16 * time.Minute, nil, []string{"11m0s not ready: no progress for 10m0s", "15m0s "}, 2,
		},
		"restarts": {
			map[time.Duration]initapi.State{
				time.Minute: initapi.StateStarting, 5 * time.Minute: initapi.StateBackoff, 6 * time.Minute: initapi.StateStarting,
				9 * time.Minute: initapi.StateBackoff, 10 * time.Minute: initapi.StateStarting,
			},
			45 * time.Minute, nil, []string{"11m0s not ready: no progress for 10m0s"}, 5,
		},
		"fails": {nil, time.Minute, broken, nil, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := &slowStart{begun: time.Now(), states: test.states}
				p := persistence{watch: m.watch, report: m.report, log: slog.New(slog.DiscardHandler)}
				attempts := 0
				err := p.run(t.Context(), func(ctx context.Context) error {
					attempts++
					select {
					case <-time.After(test.ends - time.Since(m.begun)):
						return test.err
					case <-ctx.Done():
						return fmt.Errorf("not ready: %w", context.Cause(ctx))
					}
				})
				if !errors.Is(err, test.err) || time.Since(m.begun) != test.ends || attempts != test.attempts {
					t.Errorf("ended after %s and %d attempts with: %v", time.Since(m.begun), attempts, err)
				}
				if diff := cmp.Diff(test.reported, m.reported); diff != "" {
					t.Error(diff)
				}
			})
		})
	}
}

// TestPersistenceEnds: the end of the program ends the start.
func TestPersistenceEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithTimeout(t.Context(), time.Minute)
		defer stop()
		m := &slowStart{begun: time.Now()}
		p := persistence{watch: m.watch, report: m.report, log: slog.New(slog.DiscardHandler)}
		err := p.run(ctx, func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		})
		if err == nil || m.reported != nil {
			t.Errorf("error %v, reports %v", err, m.reported)
		}
	})
}

// TestImagesReported: the error of the first pull is reported at once. Progress of services does not withdraw it, and a repeated error
// is no new report. The machine continues to try, and its success withdraws the report.
func TestImagesReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &slowStart{begun: time.Now(), states: map[time.Duration]initapi.State{15 * time.Second: initapi.StateReady}}
		p := &persistence{watch: m.watch, report: m.report, log: slog.New(slog.DiscardHandler)}
		n := &node{log: p.log, reportImages: p.reportImages}
		attempts := 0
		err := p.run(t.Context(), func(ctx context.Context) error {
			return n.untilPulled(ctx, 10*time.Second, func() error {
				switch attempts++; {
				case attempts < 3:
					return errors.New("certificate signed by unknown authority")
				case attempts == 3:
					return errors.New("no such image")
				}
				return nil
			})
		})
		if err != nil || attempts != 4 {
			t.Errorf("%d attempts, %v", attempts, err)
		}
		if diff := cmp.Diff([]string{"0s spec.images: certificate signed by unknown authority", "20s spec.images: no such image", "30s "}, m.reported); diff != "" {
			t.Error(diff)
		}
	})
}

// TestImagesStall: when a start without its images stalls, the report stays the error of the pull until a pull succeeds.
func TestImagesStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &slowStart{begun: time.Now()}
		p := &persistence{watch: m.watch, report: m.report, log: slog.New(slog.DiscardHandler)}
		n := &node{log: p.log, reportImages: p.reportImages}
		attempts := 0
		err := p.run(t.Context(), func(ctx context.Context) error {
			attempts++
			return n.untilPulled(ctx, time.Hour, func() error {
				if attempts == 1 {
					return errors.New("no such registry")
				}
				return nil
			})
		})
		if err != nil || attempts != 2 {
			t.Errorf("%d attempts, %v", attempts, err)
		}
		if diff := cmp.Diff([]string{"0s spec.images: no such registry", "10m0s "}, m.reported); diff != "" {
			t.Error(diff)
		}
	})
}
