package measure

import (
	"encoding/json"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Yardstick measures the speed of the box: the mean processor time of a fixed piece of work. A box that does other work beside, or shares
// its processors, needs more processor time for the same work, so that processor times of different minutes are only comparable as
// multiples of it.
type Yardstick struct {
	total time.Duration
	n     int
}

// object is decoded by the work, because the managers spend most of their time with the decoding of objects.
var object = []byte(`{"list":[` + strings.Repeat(`{"name":"a","labels":{"one":"two","three":"four"},"number":12345,"ready":true},`, 49) + `{}]}`)

// Work does the work once, in about 20 milliseconds.
func (y *Yardstick) Work() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before, err := threadTime()
	if err != nil {
		return err
	}
	for range 100 {
		var decoded map[string]any
		if err := json.Unmarshal(object, &decoded); err != nil {
			return err
		}
	}
	after, err := threadTime()
	y.total += after - before
	y.n++
	return err
}

// Mean is the mean processor time of the work.
func (y *Yardstick) Mean() time.Duration { return y.total / time.Duration(max(1, y.n)) }

func threadTime() (time.Duration, error) {
	var t unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t)
	return time.Duration(t.Nano()), err
}
