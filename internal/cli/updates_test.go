package cli

import (
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"capstan.dev/capstan/internal/cli/diagnosis"
)

func TestPrintUpdates(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	var out strings.Builder
	w := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	printUpdates(w, []diagnosis.Update{
		{Namespace: "n", Cluster: "a", Group: "control plane", Machine: "cp-1", Version: "v1.36.3", State: "UpdateRunning", Step: "kubelet", Message: "kubelet: because", Since: now.Add(-30 * time.Second), Remaining: 2},
		{Namespace: "n", Cluster: "a", Group: "md", Machine: "md-1", State: "WaitingForUpdate", Message: "kubelet: because", Since: now.Add(-time.Minute), Remaining: 1},
		{Namespace: "n", Cluster: "b", Machine: "alone", State: "WaitingForUpdate", Remaining: 1},
	}, now)
	_ = w.Flush()
	want := []string{
		"UPDATE OF GROUP REMAINING TO STATE STEP SINCE MESSAGE",
		"n/cp-1 control plane of a 2 v1.36.3 UpdateRunning kubelet 30s because",
		"n/md-1 md of a 1 - WaitingForUpdate - 60s kubelet: because",
		"n/alone worker of b 1 - WaitingForUpdate - -",
	}
	var got []string
	for line := range strings.Lines(strings.TrimSpace(out.String())) {
		got = append(got, strings.Join(strings.Fields(line), " "))
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	out.Reset()
	printUpdates(&out, nil, now)
	if out.Len() > 0 {
		t.Errorf("without updates: %q", out.String())
	}
}
