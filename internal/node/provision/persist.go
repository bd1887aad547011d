package provision

import (
	"cmp"
	"context"
	"log/slog"
	"sync"
	"time"

	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/stall"
)

// stallTime is the time without progress of a service after which the start is reported as stalled and tried again. An API
// server on a very slow host, such as an emulated one, needs more than five minutes.
const stallTime = 10 * time.Minute

// ranks orders the states of each service. A service that has ended has no rank, so restarts are no progress.
func ranks(services []initapi.Service) map[string]int {
	order := map[initapi.State]int{initapi.StateWaiting: 1, initapi.StateStarting: 2, initapi.StateRunning: 3, initapi.StateReady: 4}
	out := map[string]int{}
	for _, s := range services {
		out[s.Name] = order[s.State]
	}
	return out
}

// persistence repeats a start that stalls.
type persistence struct {
	// watch and report are calls to PID 1.
	watch  func(context.Context, func(initapi.Status) bool) error
	report func(ctx context.Context, reason string) error
	log    *slog.Logger

	furthest stall.Furthest

	mu sync.Mutex
	// stalledBy is the cause of the end of the last attempt; missing is the cause of missing images.
	stalledBy, missing, reported string
}

// run calls do until it ends by itself. While services make progress, do has time. Otherwise its context ends, PID 1 gets its
// error as the reason, and do is called again.
func (p *persistence) run(ctx context.Context, do func(context.Context) error) error {
	p.furthest = stall.Furthest{}
	for {
		attempt, advance, cancel := stall.Context(ctx, stallTime)
		var following sync.WaitGroup
		following.Go(func() { p.follow(attempt, advance) })
		err := do(attempt)
		stalled := stall.Stalled(attempt)
		cancel()
		following.Wait()
		if err == nil || !stalled {
			return err
		}
		p.log.Warn("The start makes no progress and is tried again", "error", err)
		p.reportChange(ctx, func() { p.stalledBy = err.Error() })
	}
}

// reportImages reports at once why the machine cannot pull its images: users can correct this. An empty reason withdraws it, and an
// earlier stall: the pull was its cause.
func (p *persistence) reportImages(ctx context.Context, reason string) {
	p.reportChange(ctx, func() {
		if reason == "" && p.missing != "" {
			p.stalledBy = ""
		}
		p.missing = reason
	})
}

// follow calls advance whenever a service makes progress, and withdraws the report of a stall.
func (p *persistence) follow(ctx context.Context, advance func()) {
	err := p.watch(ctx, func(s initapi.Status) bool {
		if p.furthest.Advance(ranks(s.Services)) {
			advance()
			p.reportChange(ctx, func() { p.stalledBy = "" })
		}
		return true
	})
	if ctx.Err() == nil {
		p.log.Warn("Cannot watch the services", "error", err)
	}
}

func (p *persistence) reportChange(ctx context.Context, change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
	reason := cmp.Or(p.missing, p.stalledBy)
	if reason == p.reported {
		return
	}
	if err := p.report(ctx, reason); err != nil {
		p.log.Warn("Cannot report the progress", "error", err)
		return
	}
	p.reported = reason
}
