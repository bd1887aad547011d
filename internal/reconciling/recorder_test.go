package reconciling

import (
	"strings"
	"testing"

	"k8s.io/client-go/tools/events"
)

type fakeRecorders struct{ *events.FakeRecorder }

func (f fakeRecorders) GetEventRecorder(string) events.EventRecorder { return f }

// TestEventTexts: the API server refuses an event whose text is longer than 1024 bytes.
func TestEventTexts(t *testing.T) {
	for name, test := range map[string]struct{ text, want string }{
		"short":       {"100% of 3", "100% of 3"},
		"the longest": {strings.Repeat("a", 1024), strings.Repeat("a", 1024)},
		"longer":      {strings.Repeat("a", 1025), strings.Repeat("a", 1021) + "…"},
		"characters":  {strings.Repeat("ä", 600), strings.Repeat("ä", 510) + "…"},
	} {
		t.Run(name, func(t *testing.T) {
			fake := fakeRecorders{events.NewFakeRecorder(1)}
			EventRecorder(fake, "test").Eventf(nil, nil, "Warning", "Failed", "Start", "%s", test.text)
			if got := <-fake.Events; got != "Warning Failed "+test.want {
				t.Errorf("recorded %q", got)
			}
		})
	}
}
