package cli

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
)

// step is one line of a progress.
type step struct {
	name string
	done bool
	// note says how far it is, or what is in the way.
	note string
}

// shown is a step with the time at which it was done.
type shown struct {
	step
	at time.Duration
}

// progress shows steps with their elapsed time. On a terminal the open steps are rewritten in place;
// elsewhere each step is one line, written when it is done.
type progress struct {
	out   io.Writer
	live  bool
	quiet bool
	start time.Time
	now   func() time.Time

	mu    sync.Mutex
	steps []shown
	drawn int // open lines on the terminal
	stop  chan struct{}
	once  sync.Once
}

func (a *app) newProgress() *progress {
	p := &progress{out: a.out, live: a.live, quiet: a.json(), start: time.Now(), now: time.Now, stop: make(chan struct{})}
	if p.live && !p.quiet {
		go p.tick()
	}
	return p
}

// tick keeps the clock of the open steps going.
func (p *progress) tick() {
	t := time.NewTicker(100 * time.Millisecond)
	defer t.Stop()
	for {
		select {
		case <-p.stop:
			return
		case <-t.C:
			p.mu.Lock()
			p.draw("")
			p.mu.Unlock()
		}
	}
}

// show takes the newest steps. A step that is done stays done, and its time stays.
func (p *progress) show(steps []step) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var finished []string
	elapsed := p.now().Sub(p.start)
	p.steps, finished = merge(p.steps, steps, elapsed)
	if p.quiet {
		return
	}
	p.draw(strings.Join(finished, ""))
}

// remark writes a line where lines cannot be rewritten; on a terminal the steps themselves say it.
func (p *progress) remark(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.live && !p.quiet {
		fmt.Fprintf(p.out, "%6.1fs  … waiting for %s\n", p.now().Sub(p.start).Seconds(), text)
	}
}

// merge brings the steps up to date and returns the lines of those that are done now.
func merge(have []shown, steps []step, elapsed time.Duration) (next []shown, finished []string) {
	done := map[string]shown{}
	for _, s := range have {
		if s.done {
			done[s.name] = s
		}
	}
	for _, s := range steps {
		if before, ok := done[s.name]; ok {
			next = append(next, before)
			continue
		}
		now := shown{step: s}
		if s.done {
			now.at = elapsed
			finished = append(finished, line(now, elapsed))
		}
		next = append(next, now)
	}
	return next, finished
}

// line of a step. Open steps show the time so far.
func line(s shown, elapsed time.Duration) string {
	mark, at := "…", elapsed
	if s.done {
		mark, at = "✓", s.at
	}
	text := fmt.Sprintf("%6.1fs  %s %s", at.Seconds(), mark, s.name)
	if s.note != "" {
		text += ": " + s.note
	}
	return text + "\n"
}

// draw writes the lines of finished steps, and on a terminal the open ones below them.
func (p *progress) draw(finished string) {
	if !p.live {
		fmt.Fprint(p.out, finished)
		return
	}
	var b strings.Builder
	if p.drawn > 0 {
		fmt.Fprintf(&b, "\x1b[%dA\x1b[J", p.drawn)
	}
	b.WriteString(finished)
	p.drawn = 0
	elapsed := p.now().Sub(p.start)
	for _, s := range p.steps {
		if !s.done {
			b.WriteString(line(s, elapsed))
			p.drawn++
		}
	}
	fmt.Fprint(p.out, b.String())
}

// close ends the progress; open steps are taken off the terminal.
func (p *progress) close() {
	p.once.Do(func() {
		close(p.stop)
		p.mu.Lock()
		defer p.mu.Unlock()
		p.steps = nil
		if p.live && !p.quiet {
			p.draw("")
		}
	})
}
