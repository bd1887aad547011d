//go:build e2e

package controlplane

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	apimeta "k8s.io/apimachinery/pkg/api/meta"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

// killer kills processes repeatedly. A killed process runs again within seconds.
type killer struct {
	stop   context.CancelFunc
	done   sync.WaitGroup
	killed []string
}

// killEvery leaves time for the restart.
const killEvery = 12 * time.Second

// startKiller calls kill with 0, 1, 2 and so on. kill returns the name of the killed process.
func startKiller(t *testing.T, every time.Duration, kill func(n int) (string, error)) *killer {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	k := &killer{stop: cancel}
	k.done.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			if what, err := kill(n); err == nil {
				k.killed = append(k.killed, what)
			}
			select {
			case <-ctx.Done():
			case <-time.After(every):
			}
		}
	})
	t.Cleanup(k.end)
	return k
}

// startInTurn kills a whole machine, an API server and a member of etcd, one after the other. An operation would never complete
// under unlimited kills. The next kill waits until all members are healthy again, so that the operation makes progress on a slow
// host, too.
func (s *subject) startInTurn(t *testing.T) *killer {
	t.Helper()
	services := []string{"capstan-init", "kube-apiserver", "etcd"}
	killed := 0
	return startKiller(t, killEvery, func(int) (string, error) {
		switch {
		case killed == len(services):
			return "", errors.New("the killer has done its round")
		case !s.well(context.WithoutCancel(t.Context())):
			return "", errors.New("the last killed process does not run yet")
		}
		what, err := killOn(s.Name, services[killed], killed, 3)
		if err == nil {
			killed++
		}
		return what, err
	})
}

// well reports whether there are at least three voting members, all of them healthy.
func (s *subject) well(ctx context.Context) bool {
	members := &etcdv1.EtcdMemberList{}
	if err := s.etcd.List(ctx, members); err != nil {
		return false
	}
	voting := 0
	for _, m := range members.Items {
		switch {
		case !apimeta.IsStatusConditionTrue(m.Status.Conditions, etcdv1.JoinedCondition):
		case !apimeta.IsStatusConditionTrue(m.Status.Conditions, etcdv1.HealthyCondition):
			return false
		default:
			voting++
		}
	}
	return voting >= 3
}

func (k *killer) end() { k.stop(); k.done.Wait() }

// report logs the killed processes. It fails the test if there are none.
func (k *killer) report(t *testing.T) {
	t.Helper()
	t.Logf("killed meanwhile: %s", strings.Join(k.killed, ", "))
	if len(k.killed) == 0 {
		t.Error("no process was killed")
	}
}

// killOn kills the service on the n-th of the machines that run it, if enough machines run it.
func killOn(cluster, service string, n, least int) (string, error) {
	all, err := harness.Processes()
	if err != nil {
		return "", err
	}
	var running []harness.Process
	for _, p := range all {
		// PID 1 of a machine has no arguments. The same program with arguments is its agent.
		if p.Name == service && strings.HasPrefix(p.Machine, cluster+"-control-plane-") && (service != "capstan-init" || len(p.Args) == 1) {
			running = append(running, p)
		}
	}
	if len(running) < max(1, least) {
		return "", errors.New("another one does not run")
	}
	slices.SortFunc(running, func(a, b harness.Process) int { return strings.Compare(a.Machine, b.Machine) })
	victim := running[n%len(running)]
	return service + " of " + victim.Machine, syscall.Kill(victim.PID, syscall.SIGKILL)
}

// killSoon is shorter than the join of a machine, so that the kill interrupts the join.
const killSoon = 4 * time.Second

// scaleUnderKills scales to n machines. Meanwhile API servers, members of etcd, whole machines and the manager are killed.
func (s *subject) scaleUnderKills(t *testing.T, n int) {
	start := time.Now()
	s.scale(t, int32(n))
	k := startKiller(t, killSoon, func(i int) (string, error) {
		switch i % 4 {
		case 0:
			return "the manager", killManagers()
		case 1:
			return killOn(s.Name, "etcd", i/4, 2)
		case 2:
			return killOn(s.Name, "kube-apiserver", i/4, 1)
		}
		return killOn(s.Name, "capstan-init", i/4, 2)
	})
	// The kills end after some time, because the operation would never complete otherwise.
	harness.Eventually(t, "the killer has done its rounds", limit, func(ctx context.Context) error {
		voters, while := s.voters(ctx), time.Since(start)
		if while < 4*killSoon || while < 8*killSoon && voters != n {
			return fmt.Errorf("%d voters of %d", voters, n)
		}
		return nil
	})
	k.end()
	s.settled(t, n)
	k.report(t)
}

// killManagers kills the manager of this plane. The plane starts it again.
func killManagers() error {
	all, err := harness.Processes()
	if err != nil {
		return err
	}
	for _, p := range all {
		if p.Machine == "" && p.Name == "manager" && strings.Contains(strings.Join(p.Args, " "), plane.Root) {
			return syscall.Kill(p.PID, syscall.SIGKILL)
		}
	}
	return errors.New("no manager runs")
}

// voters returns the number of voting members, or -1 if no API server responds.
func (s *subject) voters(ctx context.Context) int {
	members := &etcdv1.EtcdMemberList{}
	if err := s.etcd.List(ctx, members); err != nil {
		return -1
	}
	n := 0
	for _, m := range members.Items {
		if apimeta.IsStatusConditionTrue(m.Status.Conditions, etcdv1.JoinedCondition) {
			n++
		}
	}
	return n
}
