//go:build e2e

package host_test

import (
	"context"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
)

// `capstan host versions` adds and removes a version. capstand publishes both without a restart.
func TestVersions(t *testing.T) {
	leavesNothing(t)
	c := newCapstand(t)
	capstan := func(args ...string) (string, error) {
		out, err := exec.CommandContext(c.ctx(), filepath.Join(harness.Bin(), "capstan"), append([]string{"--root", c.root, "--assets", c.assets, "host", "versions"}, args...)...).CombinedOutput()
		return string(out), err
	}
	must := func(args ...string) string {
		t.Helper()
		out, err := capstan(args...)
		if err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
		return out
	}
	watching, stop := context.WithCancel(c.ctx())
	t.Cleanup(stop)
	stream, err := c.Watch(watching, &hostpb.WatchRequest{})
	expect.NoError(t, err)
	// published follows one stream, so that capstand sends the change by itself.
	published := func(version string, wanted bool) {
		t.Helper()
		for {
			event, err := stream.Recv()
			if err != nil {
				t.Fatalf("%s is not published as %v: %v", version, wanted, err)
			}
			if h := event.GetHost(); h != nil && slices.Contains(h.KubernetesVersions, version) == wanted {
				return
			}
		}
	}
	published(formerVersion, false)

	if out := must("add", filepath.Join(harness.Bin(), "kubernetes", formerVersion)); !strings.Contains(out, formerVersion+" was added") || strings.Contains(out, "only workers") {
		t.Errorf("add: %s", out)
	}
	published(formerVersion, true)
	spec := blue.machine(10)
	spec.KubernetesVersion = formerVersion
	m := c.make(spec)
	if out, err := capstan("remove", formerVersion); err == nil || !strings.Contains(out, "machine "+spec.Namespace+"/"+spec.Name) {
		t.Errorf("the removal of a used version: %v: %s", err, out)
	}
	if out := must("list"); !strings.Contains(out, "machine "+spec.Namespace+"/"+spec.Name) {
		t.Errorf("list: %s", out)
	}
	c.deleteMachine(m.Spec)
	must("remove", formerVersion)
	published(formerVersion, false)

	archive := filepath.Join(t.TempDir(), "kubernetes.tar.gz")
	host(t, "tar -cf "+archive+" --use-compress-program='gzip -1' -C "+harness.Bin()+" kubernetes")
	if out, err := capstan("add", archive); err == nil || !strings.Contains(out, "--version") {
		t.Errorf("an archive of two versions: %v: %s", err, out)
	}
	must("add", archive, "--version", formerVersion)
	published(formerVersion, true)
}
