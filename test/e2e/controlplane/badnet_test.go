//go:build e2e

package controlplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"k8s.io/utils/ptr"
	"sigs.k8s.io/cluster-api/util/conditions"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/test/e2e/harness"
)

// cutOff cuts the machine of etcd's leader off from everything. The others elect a leader and go on; when it is back,
// it is the member that it was, and nothing was replaced.
func cutOff(t *testing.T, s *subject) {
	before := slices.Sorted(maps.Keys(s.mustMachines(t)))
	leader := s.leader(t)
	mend := spoil(t, leader, "drop")
	harness.Eventually(t, "the members notice", limit, func(ctx context.Context) error {
		members := &etcdv1.EtcdMemberList{}
		if err := s.etcd.List(ctx, members); err != nil {
			return err
		}
		leads, unhealthy := "", false
		for _, m := range members.Items {
			if m.Name == leader {
				unhealthy = conditions.IsFalse(&m, etcdv1.HealthyCondition)
			} else if ptr.Deref(m.Status.Leader, false) {
				leads = m.Name
			}
		}
		if leads == "" || !unhealthy {
			return fmt.Errorf("new leader %q, the former one is seen as unhealthy: %v", leads, unhealthy)
		}
		return nil
	})
	s.progress(t, 20)
	mend()
	s.settled(t, 3)
	s.same(t, before)
}

// losePackets drops three of a hundred packets at each end of each machine's line. Writes go on, and nothing is replaced.
func losePackets(t *testing.T, s *subject) {
	before := slices.Sorted(maps.Keys(s.mustMachines(t)))
	for _, name := range before {
		t.Cleanup(spoil(t, name, "numgen random mod 100 < 3 drop"))
	}
	s.progress(t, 50)
	s.same(t, before)
}

// progress waits for so many acknowledged writes.
func (s *subject) progress(t *testing.T, n int) {
	t.Helper()
	count := func() int {
		s.writer.mu.Lock()
		defer s.writer.mu.Unlock()
		return len(s.writer.acknowledged)
	}
	before := count()
	harness.Eventually(t, fmt.Sprintf("%d writes", n), limit, func(context.Context) error {
		if now := count(); now < before+n {
			return fmt.Errorf("%d were acknowledged", now-before)
		}
		return nil
	})
}

// same checks that the machines are those of before.
func (s *subject) same(t *testing.T, before []string) {
	t.Helper()
	if now := slices.Sorted(maps.Keys(s.mustMachines(t))); !slices.Equal(now, before) {
		t.Errorf("the machines were %v, are %v", before, now)
	}
}

// leader is the machine of etcd's leader.
func (s *subject) leader(t *testing.T) (name string) {
	t.Helper()
	harness.Eventually(t, "a leader", limit, func(ctx context.Context) error {
		members := &etcdv1.EtcdMemberList{}
		if err := s.etcd.List(ctx, members); err != nil {
			return err
		}
		for _, m := range members.Items {
			if ptr.Deref(m.Status.Leader, false) {
				name = m.Name
				return nil
			}
		}
		return errors.New("no member leads")
	})
	return name
}

// spoil applies a rule to all packets of a machine, in its own network namespace, until mend is called.
func spoil(t *testing.T, machine, rule string) (mend func()) {
	t.Helper()
	pid := ""
	for _, p := range plane.FindRunning(t, machine, "capstan-init", 2) { // PID 1 and the node agent
		if len(p.Args) == 1 {
			pid = strconv.Itoa(p.PID)
		}
	}
	inside := func(rules string) error {
		cmd := exec.Command("nsenter", "-n", "-t", pid, "nft", "-f", "-")
		cmd.Stdin = strings.NewReader(rules)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("nft in %s: %w: %s", machine, err, out)
		}
		return nil
	}
	err := inside(fmt.Sprintf(`table inet spoil {
	chain input { type filter hook input priority -400; iifname "eth0" %[1]s; }
	chain output { type filter hook output priority -400; oifname "eth0" %[1]s; }
}
`, rule))
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := inside("delete table inet spoil\n"); err != nil {
			t.Error(err)
		}
	}
}
