package host

import (
	"testing"
	"time"

	"capstan.dev/capstan/internal/host/hostpb"
)

func TestPulsesOfManagers(t *testing.T) {
	const lease = hostpb.PulseLease
	type look struct {
		at      time.Duration
		watched bool
		want    bool
	}
	for name, c := range map[string]struct {
		pulses []time.Duration
		looks  []look
	}{
		"no manager":                      {nil, []look{{0, false, false}}},
		"an older manager":                {nil, []look{{0, true, true}, {time.Hour, true, true}}},
		"the first pulse":                 {[]time.Duration{0}, []look{{1, true, false}, {2, true, true}}},
		"regular pulses":                  {[]time.Duration{0, lease / 2, lease, 3 * lease / 2}, []look{{0, true, false}, {lease, true, true}, {2 * lease, true, true}}},
		"no more pulses":                  {[]time.Duration{0}, []look{{0, true, false}, {lease, true, true}, {lease + 1, true, false}, {time.Hour, true, false}}},
		"a gap between two looks":         {[]time.Duration{0, 1, lease + 2}, []look{{1, true, false}, {lease + 2, true, false}, {lease + 3, true, true}}},
		"two pulses after a gap":          {[]time.Duration{0, 1, lease + 2, lease + 3}, []look{{1, true, false}, {lease + 3, true, false}, {lease + 4, true, true}}},
		"the manager disconnects":         {[]time.Duration{0, 1}, []look{{1, true, false}, {2, true, true}, {3, false, false}}},
		"a manager connects without them": {[]time.Duration{0}, []look{{0, true, false}, {lease + 1, false, false}, {time.Hour, true, false}}},
	} {
		p, start := &pulses{}, lease/2 // after the boot
		for _, l := range c.looks {
			for len(c.pulses) > 0 && c.pulses[0] <= l.at {
				p.receive(start + c.pulses[0])
				c.pulses = c.pulses[1:]
			}
			if got := p.managed(start+l.at, l.watched); got != l.want {
				t.Errorf("%s: after %s: managed %v, want %v", name, l.at, got, l.want)
			}
		}
	}
}
