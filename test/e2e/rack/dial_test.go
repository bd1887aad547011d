//go:build e2e

package rack_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/accessapi"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/test/e2e/harness"
	"capstan.dev/capstan/test/rack"
)

// dialPort is where the manager accepts hosts that dial it.
const dialPort = "7444"

// Issue 14: a box behind NAT joins. Nothing reaches it except answers and the forwarded ports of clusters' endpoints. It dials the
// manager, becomes Ready, runs the machine of a cluster, and returns after its connections are cut and after a restart.
func joinBehindNAT(t *testing.T, plane *harness.Plane) {
	boxes, router := newRack(t, 1, rack.Software{Capstand: filepath.Join(harness.Bin(), "capstand"), Assets: harness.Bin()})
	rack.Uplink(t, router)
	router.Run(`nft -f - <<'END'
table ip nat_test {
	chain out { type nat hook postrouting priority 100; oifname "plane" masquerade; }
	chain in {
		type filter hook forward priority 0;
		iifname "plane" ct state established,related accept
		iifname "plane" tcp dport 20000-23999 accept
		iifname "plane" drop
	}
}
END`)
	b := boxes[0]
	text, _ := newToken(t, plane, "--allow-namespace", "default")
	dial := planeAddress + ":" + dialPort
	// The tunnel address is that of the endpoint of clusters, whose ports are forwarded.
	out, err := b.joins(text, "--dial", dial, "--tunnel-address", b.Tunnel())
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if !strings.Contains(out, "--dial "+dial) {
		t.Errorf("the join prints: %s", out)
	}
	expectDialling(t, plane, "Unreachable", "found no connection of it")
	b.End(syscall.SIGTERM)
	args := slices.Clone(b.Args)
	b.Args = append(b.Args, "--dial", dial, "--name", joinedName)
	b.Start()
	host := ready(t, plane)
	if host.Spec.Address != "" || !host.Dials() {
		t.Errorf("spec: %+v", host.Spec)
	}
	if listening := b.Run("ss -Hltn 'sport = :7443'"); listening != "" {
		t.Errorf("capstand listens: %s", listening)
	}

	c := plane.CreateCluster(t, "default", "dialled", "--control-plane-machines", "1", "--workers", "0", "--timeout", "5m")
	harness.Eventually(t, "a Node on the host", time.Minute, func(ctx context.Context) error { return c.NodesReady(ctx, 1) })
	name := c.Machines(t)[0].Name

	router.Run(`nft -f - <<'END'
table ip nat_cut {
	chain in {
		type filter hook forward priority -1;
		tcp dport ` + dialPort + ` drop
		tcp sport ` + dialPort + ` drop
	}
}
END`)
	expectDialling(t, plane, "Unreachable", "")
	router.Run("nft delete table ip nat_cut")
	ready(t, plane)
	checkLog(t, plane, name)

	b.End(syscall.SIGTERM)
	expectDialling(t, plane, "Unreachable", "")
	b.Start()
	ready(t, plane)
	c.Delete(t)
	b.End(syscall.SIGTERM)
	b.Args = args
	if out, err := b.leaveCommand().CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if _, err := os.Stat(filepath.Join(b.Root, "tls")); !os.IsNotExist(err) {
		t.Errorf("the folder of the certificates remains: %v", err)
	}
}

// checkLog reads the log of a machine over the API of the management cluster: the manager uses another connection of the host.
func checkLog(t *testing.T, plane *harness.Plane, machine string) {
	t.Helper()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	expect.NoError(t, os.WriteFile(kubeconfig, []byte(plane.Must(t, "get", "kubeconfig", "--management")), 0o600))
	harness.Eventually(t, "the log of the machine", time.Minute, func(ctx context.Context) error {
		out, err := harness.Command(ctx, nil, harness.Kubectl(), "--kubeconfig", kubeconfig, "get", "--raw", accessapi.Path("default", machine, accessapi.Log))
		if err == nil && out == "" {
			err = errors.New("an empty log")
		}
		return err
	})
}

// expectDialling waits until the host is not connected, for this reason.
func expectDialling(t *testing.T, plane *harness.Plane, reason, message string) {
	t.Helper()
	harness.Eventually(t, "a host that is "+reason, 2*time.Minute, func(ctx context.Context) error {
		host := &infrav1.CapstanHost{}
		if err := plane.Client.Get(ctx, client.ObjectKey{Name: joinedName}, host); err != nil {
			return err
		}
		c := conditions.Get(host, infrav1.HostConnectedCondition)
		if c == nil || c.Status == metav1.ConditionTrue || c.Reason != reason || !strings.Contains(c.Message, message) {
			return fmt.Errorf("%+v", c)
		}
		return nil
	})
}
