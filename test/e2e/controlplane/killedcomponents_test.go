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

// killer kills something again and again. What it kills is back within seconds.
type killer struct {
	stop   context.CancelFunc
	done   sync.WaitGroup
	killed []string
}

// killEvery leaves time to come back.
const killEvery = 12 * time.Second

// startKiller calls kill, which says what it has killed, with 0, 1, 2 and so on.
func startKiller(t *testing.T, every time.Duration, kill func(n int) (string, error)) *killer {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	k := &killer{stop: cancel}
	k.done.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			if what, err := kill(n); err == nil {
				k.killed = append(k.killed, what)
			}
			pause(ctx, every)
		}
	})
	t.Cleanup(k.end)
	return k
}

// startInTurn kills whole machines, API servers and members of etcd in turn, as many rounds as told: what is killed for
// ever is never done. The next one is killed when all is well again, so that a slow box gets somewhere, too.
func (s *subject) startInTurn(t *testing.T, rounds int) *killer {
	t.Helper()
	services := []string{"capstan-init", "kube-apiserver", "etcd"}
	killed := 0
	return startKiller(t, killEvery, func(int) (string, error) {
		switch {
		case killed == rounds*len(services):
			return "", errors.New("enough is killed")
		case !s.well(context.WithoutCancel(t.Context())):
			return "", errors.New("the last one is not back yet")
		}
		// Another machine in each round.
		what, err := killOn(s.Name, services[killed%len(services)], killed+killed/len(services), 3)
		if err == nil {
			killed++
		}
		return what, err
	})
}

// well says that there are three voting members at least, and that all of them are healthy.
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

// killOn kills the service on the n-th of the machines that run it, if there are enough of them.
func killOn(cluster, service string, n, least int) (string, error) {
	all, err := harness.Processes()
	if err != nil {
		return "", err
	}
	var running []harness.Process
	for _, p := range all {
		// PID 1 of a machine has no arguments; the same program with some is its agent.
		if p.Name == service && strings.HasPrefix(p.Machine, cluster+"-control-plane-") && (service != "capstan-init" || len(p.Args) == 1) {
			running = append(running, p)
		}
	}
	if len(running) < max(1, least) {
		return "", errors.New("one is away already")
	}
	slices.SortFunc(running, func(a, b harness.Process) int { return strings.Compare(a.Machine, b.Machine) })
	victim := running[n%len(running)]
	return service + " of " + victim.Machine, syscall.Kill(victim.PID, syscall.SIGKILL)
}

const (
	// killSoon is shorter than a machine needs to join, so that it is hit on its way.
	killSoon = 4 * time.Second
	// longPatience: while there are two members, the majority is gone when one of them starts again.
	longPatience = time.Minute
)

// TestKilledWhileScaled scales from 1 to 3 and back while API servers, members of etcd, whole machines and the
// manager are killed (CP-03, CP-16). It ends right, and every acknowledged write is found.
func TestKilledWhileScaled(t *testing.T) {
	s := &subject{Cluster: plane.CreateCluster(t, "default", "kill", "--workers", "0"), made: map[string]bool{}}
	s.etcd = memberClient(t, s.Kubeconfig)
	s.settled(t, 1)
	w := startPatientWriter(t, s.Cluster, longPatience)
	for _, n := range []int{3, 1} {
		t.Run(fmt.Sprintf("to %d", n), func(t *testing.T) {
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
			// A while of it is enough: what is killed for ever is never done.
			harness.Eventually(t, "enough is killed", limit, func(ctx context.Context) error {
				voters, while := s.voters(ctx), time.Since(start)
				if while < 4*killSoon || while < 8*killSoon && voters != n {
					return fmt.Errorf("%d voters of %d", voters, n)
				}
				return nil
			})
			k.end()
			s.settled(t, n)
			t.Logf("took %.1f s; killed meanwhile: %s; longest gap between acknowledged writes %.1f s", time.Since(start).Seconds(), strings.Join(k.killed, ", "), w.longestGap().Seconds())
			if len(k.killed) == 0 {
				t.Error("nothing was killed")
			}
		})
	}
	w.check(t)
}

// killManagers kills the manager of this plane; the plane starts it again.
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

// voters are how many members have a vote; -1 when nobody can be asked.
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
