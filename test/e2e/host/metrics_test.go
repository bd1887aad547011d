//go:build e2e

package host_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/ports"
	"capstan.dev/capstan/test/e2e/harness"
)

// The metrics follow the machines and the load balancers of the host, also those of the previous capstand.
func TestMetrics(t *testing.T) {
	leavesNothing(t)
	address := ports.Address(t)
	c := newCapstand(t, "--metrics-address", address)
	spec := blue.machine(10)
	c.make(spec)
	_, err := c.EnsureLoadBalancer(c.ctx(), &hostpb.LoadBalancer{
		Id: blue.id, Namespace: "default", Name: blue.name, NetworkId: blue.id, Listen: []string{":6443"},
		Backends: []*hostpb.Backend{{Name: spec.Name, Address: blue.address(10) + ":6443"}},
	})
	expect.NoError(t, err)
	awaitMetrics(t, address,
		`capstand_machines{state="RUNNING"} 1`, `capstand_machine_start_seconds_count 1`, `capstand_service_ready{machine="blue-10",namespace="default",service="`,
		`capstan_balancer_healthy_backends{cluster="blue",namespace="default"} 1`, `capstand_memory_bytes{state="allocated"} 2.68435456e+08`,
	)
	m := c.await(spec.Id, func(*hostpb.Machine) bool { return true })
	expect.NoError(t, syscall.Kill(int(m.Status.Pid), syscall.SIGKILL))
	awaitMetrics(t, address, `capstand_machine_restarts_total{machine="blue-10",namespace="default"} 1`, `capstand_machine_start_seconds_count 2`)
	c.kill()
	c.start()
	awaitMetrics(t, address, `capstand_machines{state="RUNNING"} 1`, `capstan_balancer_healthy_backends{cluster="blue",namespace="default"} 1`)
	c.deleteMachine(spec)
	awaitMetrics(t, address, `capstand_machines{state="RUNNING"} 0`, `capstan_balancer_healthy_backends{cluster="blue",namespace="default"} 0`)
}

// awaitMetrics waits until each text is in the metrics.
func awaitMetrics(t *testing.T, address string, texts ...string) {
	t.Helper()
	eventually(t, "metrics", func() error {
		res, err := http.Get("http://" + address + "/metrics")
		if err != nil {
			return err
		}
		defer func() { _ = res.Body.Close() }()
		body, err := io.ReadAll(res.Body)
		if err != nil {
			return err
		}
		for _, text := range texts {
			if !strings.Contains(string(body), text) {
				return fmt.Errorf("expected %s in\n%s", text, body)
			}
		}
		return nil
	})
}

// A capstand that cannot listen ends with an error.
func TestCannotListen(t *testing.T) {
	leavesNothing(t)
	for _, flag := range []string{"--listen=192.0.2.1:1", "--metrics-address=0.0.0.0:1", "--socket=/proc/capstand.sock"} {
		root := filepath.Join(t.TempDir(), "host")
		out, err := exec.Command("timeout", "60", filepath.Join(harness.Bin(), "capstand"), "--root="+root, "--assets="+harness.StandIns(t, programs), flag).CombinedOutput()
		if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(string(out), "capstand ends") {
			t.Errorf("%s: %v\n%s", flag, err, out)
		}
	}
}
