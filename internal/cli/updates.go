package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/duration"

	"capstan.dev/capstan/internal/cli/diagnosis"
)

// updates reads the updates in place of the machines that the user can read.
func (m *management) updates(ctx context.Context) ([]diagnosis.Update, error) {
	machines, err := m.listed(ctx, described["machine"][0], "")
	if err != nil {
		return nil, err
	}
	capstan, err := m.listed(ctx, schema.GroupKind{Group: infraGroup, Kind: "CapstanMachine"}, "")
	return diagnosis.UpdatesOf(machines, capstan), err
}

// printUpdates prints nothing without updates.
func printUpdates(w io.Writer, updates []diagnosis.Update, now time.Time) {
	if len(updates) == 0 {
		return
	}
	fmt.Fprintln(w, "\nUPDATE OF\tGROUP\tREMAINING\tTO\tSTATE\tSTEP\tSINCE\tMESSAGE")
	for _, u := range updates {
		since := ""
		if !u.Since.IsZero() {
			since = duration.HumanDuration(now.Sub(u.Since))
		}
		fmt.Fprintf(w, "%s/%s\t%s of %s\t%d\t%s\t%s\t%s\t%s\t%s\n", u.Namespace, u.Machine, cmp.Or(u.Group, "worker"), u.Cluster, u.Remaining,
			cmp.Or(u.Version, "-"), u.State, cmp.Or(u.Step, "-"), cmp.Or(since, "-"), strings.TrimPrefix(u.Message, u.Step+": "))
	}
}
