//go:build e2e

package clusterctl

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

// wantOutput waits until the output of `clusterctl describe cluster`, with all conditions, and of `kubectl get capstan` match
// the expressions. Each expression must match a line. For describe, a line contains an object and one of its conditions.
func wantOutput(t *testing.T, c *harness.Cluster, describe, get []string) {
	t.Helper()
	kubeconfig := admin(c.Plane)
	all := func(out string, wanted []string) error {
		for _, line := range wanted {
			if !regexp.MustCompile(line).MatchString(out) {
				return fmt.Errorf("no line like\n%s\nin\n%s", line, out)
			}
		}
		return nil
	}
	harness.Eventually(t, "the output of describe", 2*time.Minute, func(context.Context) error {
		out, err := clusterctl(t, nil, "describe", "cluster", c.Name, "--namespace", c.Namespace, "--kubeconfig", kubeconfig,
			"--show-conditions", "all", "--show-resourcesets", "--grouping=false", "--echo")
		if err != nil {
			return err
		}
		return all(flatten(out), describe)
	})
	harness.Eventually(t, "the output of get", 2*time.Minute, func(context.Context) error {
		out, err := kubectl(t, kubeconfig, "", "-n", c.Namespace, "get", "capstan")
		if err != nil {
			return err
		}
		return all(out, get)
	})
}

// theHost is the name of the plane's own CapstanHost.
type theHost struct{ address string }

// hostOf restores the host at the end of the test.
func hostOf(t *testing.T) theHost {
	t.Helper()
	h := &infrav1.CapstanHost{}
	if err := plane.Client.Get(t.Context(), client.ObjectKey{Name: "local"}, h); err != nil {
		t.Fatal(err)
	}
	host := theHost{h.Spec.Address}
	t.Cleanup(func() {
		host.patch(t, fmt.Sprintf(`{"spec":{"address":%q,"unschedulable":null}}`, host.address))
	})
	return host
}

func (theHost) patch(t *testing.T, patch string) {
	t.Helper()
	if _, err := plane.Kubectl(t, "patch", "capstanhost", "local", "--type=merge", "-p", patch); err != nil {
		t.Error(err)
	}
}

var (
	// These expressions match the lines of the tree without its drawing. The lines of conditions follow the line of
	// their object. A long message continues on further lines.
	objectLine    = regexp.MustCompile(`^(?:!! DELETED !! )?([A-Z]\w+) [^/\s]+/([^\s,]+)`)
	conditionLine = regexp.MustCompile(`^(\w+) +(True|False|Unknown) +(\S+) +\S+ *(.*)$`)
)

// flatten returns one line for each condition: its object, status, reason and message.
func flatten(tree string) string {
	var lines []string
	object := ""
	for line := range strings.Lines(tree) {
		line = strings.TrimSpace(strings.TrimLeft(line, "│├└─ "))
		if found := objectLine.FindStringSubmatch(line); found != nil {
			object = found[1] + "/" + found[2]
			lines = append(lines, object+":")
		} else if found := conditionLine.FindStringSubmatch(line); found != nil {
			lines = append(lines, fmt.Sprintf("%s %s: %s %s %s", object, found[1], found[2], found[3], found[4]))
		} else if len(lines) > 0 {
			lines[len(lines)-1] += " " + line
		}
	}
	return strings.Join(lines, "\n")
}

func TestFlatten(t *testing.T) {
	got := flatten(`NAME                        REPLICAS AVAILABLE READY UP TO DATE STATUS REASON SINCE MESSAGE
Cluster ns/c, v1.36.3       1/1      1         1     1
│           ├─Available                                 True   Available    5s
│           └─Paused                                    False  NotPaused    1m2s
└─Workers
  └─!! DELETED !! Machine ns/m-1, v1.36.3 1/1 1 1
                └─Deleting                              True   Waiting      5s   * one
                                                                                 * two
`)
	want := `Cluster/c:
Cluster/c Available: True Available ` + `
Cluster/c Paused: False NotPaused  Workers
Machine/m-1:
Machine/m-1 Deleting: True Waiting * one * two`
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}
