package cli

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
)

// step is one line of the progress.
type step struct {
	name string
	done bool
	// note describes the progress of the step, or the problem that blocks it.
	note string
}

// shown is a step with the time of its completion.
type shown struct {
	step
	at time.Duration
}

// progress prints steps with their elapsed time. On a terminal it updates the lines of open steps. Elsewhere it prints one
// line per step when the step is done.
type progress struct {
	out   io.Writer
	live  bool
	quiet bool
	start time.Time
	now   func() time.Time

	mu    sync.Mutex
	steps []shown
	drawn int // number of open lines on the terminal
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

// tick updates the elapsed time of open steps on a terminal.
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

// show updates the steps. A step that was done stays done, with its time.
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

// remark prints the problem that blocks the progress, except on a terminal: there the open step contains it.
func (p *progress) remark(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.live && !p.quiet {
		fmt.Fprintf(p.out, "%6.1fs  … waiting for %s\n", p.now().Sub(p.start).Seconds(), text)
	}
}

// merge returns the updated steps, and the lines of the steps that have just been done.
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

// line formats a step. An open step has the time elapsed so far.
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

// draw prints the lines of finished steps. On a terminal it prints the open steps below them.
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

// close ends the progress and removes open steps from the terminal.
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
