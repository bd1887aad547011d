package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"
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
// line per step when the step is done, or one JSON document per change of a step.
type progress struct {
	out   io.Writer
	live  bool
	quiet bool
	start time.Time
	now   func() time.Time
	// width returns the columns of the terminal; 0 if they are unknown.
	width func() int
	// events receives JSON documents; nil without them.
	events *json.Encoder
	sent   map[string]step

	mu    sync.Mutex
	steps []shown
	drawn int // number of open lines on the terminal
	stop  chan struct{}
	once  sync.Once
}

// progressFormats are the values of --progress.
var progressFormats = []string{"auto", "plain", "json", "none"}

func (a *app) newProgress() *progress {
	p := &progress{out: a.out, start: time.Now(), now: time.Now, width: terminalWidth, stop: make(chan struct{}), sent: map[string]step{}}
	switch a.progressFormat {
	case "plain":
	case "none":
		p.quiet = true
	case "json":
		p.quiet, p.events = true, json.NewEncoder(a.errOut)
	default:
		p.live, p.quiet = a.live && os.Getenv("TERM") != "dumb", a.structured()
	}
	if p.live && !p.quiet {
		p.out = os.Stdout // draw moves the cursor.
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
	p.send(elapsed)
	if p.quiet {
		return
	}
	p.draw(strings.Join(finished, ""))
}

// event is a change of a step, a blocker or an error, for programs.
type event struct {
	Time           time.Time `json:"time"`
	ElapsedSeconds float64   `json:"elapsedSeconds"`
	// Step is empty if the event concerns the whole command.
	Step    string     `json:"step,omitempty"`
	State   eventState `json:"state"`
	Message string     `json:"message,omitempty"`
}

// eventState is the meaning of an event.
type eventState string

const (
	eventWaiting eventState = "Waiting" // the step is not complete
	eventStarted eventState = "Started" // the step has begun, and the next one begins after it
	eventDone    eventState = "Done"    // the step is complete
	eventBlocked eventState = "Blocked" // the message is the last wait of the command
	eventWarning eventState = "Warning" // the command continues in spite of the message
	eventFailed  eventState = "Failed"  // the message is the error of the command
)

// send writes an event for each step that has changed.
func (p *progress) send(elapsed time.Duration) {
	if p.events == nil {
		return
	}
	for _, s := range p.steps {
		if before, found := p.sent[s.name]; found && before == s.step {
			continue
		}
		p.sent[s.name] = s.step
		e := event{Time: p.now().UTC(), ElapsedSeconds: elapsed.Round(time.Millisecond).Seconds(), Step: s.name, State: eventWaiting, Message: s.note}
		if s.done {
			e.State = eventDone
		}
		if err := p.events.Encode(e); err != nil {
			return // nobody reads the events any more
		}
	}
}

// remark prints the problem that blocks the progress, except on a terminal: there the open step contains it.
func (p *progress) remark(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.live && !p.quiet {
		fmt.Fprintf(p.out, "%6.1fs  … waiting for %s\n", p.now().Sub(p.start).Seconds(), text)
	}
}

// report writes an event to standard error if the command line wants JSON events, else the text. The text is empty if only
// events contain the fact.
func (a *app) report(e event, text string) {
	if a.progressFormat != "json" {
		fmt.Fprint(a.errOut, text)
		return
	}
	e.Time, e.ElapsedSeconds = time.Now().UTC(), time.Since(a.start).Round(time.Millisecond).Seconds()
	if err := json.NewEncoder(a.errOut).Encode(e); err != nil {
		slog.Debug("Nobody reads the events", "error", err)
	}
}

// warn reports a problem in spite of which the command continues.
func (a *app) warn(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	a.report(event{State: eventWarning, Message: text}, text+"\n")
}

// step reports the next step of a command whose steps become known one by one.
func (a *app) step(format string, args ...any) {
	name, text := fmt.Sprintf(format, args...), ""
	if a.progressFormat != "none" && (a.progressFormat == "plain" || !a.structured()) {
		text = fmt.Sprintf("%6.1fs  %s\n", time.Since(a.start).Seconds(), name)
	}
	a.report(event{Step: name, State: eventStarted}, text)
}

// blocked reports the last wait of a command whose time has ended. It is part of the error, so --progress none keeps it.
func (a *app) blocked(blockers []string) {
	for _, b := range blockers {
		a.report(event{State: eventBlocked, Message: b}, "  waiting for "+b+"\n")
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
	return printable(text, "") + "\n"
}

func terminalWidth() int {
	width, _, err := term.GetSize(int(os.Stdout.Fd()))
	if err != nil {
		return 0
	}
	return width
}

// fit shortens a line to the columns of the terminal: a line that wraps could not be updated. All characters of a line have
// one column.
func fit(line string, columns int) string {
	text := []rune(strings.TrimSuffix(line, "\n"))
	if columns <= 0 || len(text) < columns {
		return line
	}
	return string(text[:max(columns-2, 0)]) + "…\n"
}

// draw prints the lines of finished steps. On a terminal it prints the open steps below them. It does not shorten finished lines:
// they are not updated again.
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
			b.WriteString(fit(line(s, elapsed), p.width()))
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
