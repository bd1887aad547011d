package etcd

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	apimeta "k8s.io/apimachinery/pkg/api/meta"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
)

const (
	// followPeriod is the period in which an agent checks whether its member leads, because etcd sends no event.
	followPeriod = time.Second
	// carePeriod is the period in which members are checked, for the same reason; busyPeriod while a change is in progress,
	// for at most busyTime.
	carePeriod = 2 * time.Second
	busyPeriod = 250 * time.Millisecond
	busyTime   = 5 * time.Minute
	// publishTimeout bounds the writes to the API server, which may not answer.
	publishTimeout = 10 * time.Second
	// retryPause is the pause after an error.
	retryPause = 500 * time.Millisecond
)

// Objects are the EtcdMembers of the cluster.
type Objects interface {
	// List returns the cached objects, and a channel that reports changes.
	List() map[string]etcdv1.EtcdMember
	Changed() <-chan struct{}
	// Create creates the object of a member that has none.
	Create(ctx context.Context, name string, spec etcdv1.EtcdMemberSpec) error
	// ApplyStatus writes the part of the status that the leader's agent owns.
	ApplyStatus(ctx context.Context, name string, status etcdv1.EtcdMemberStatus) error
	// RenewLease reports that this machine's agent manages etcd.
	RenewLease(ctx context.Context, holder string, now time.Time) error
}

// Care manages all members while the local one leads. The agents of all control plane machines run it, so the agent of the
// next leader takes over.
type Care struct {
	// Name of the local member.
	Name string
	// Endpoint of the local member.
	Endpoint string
	TLS      *tls.Config
	Objects  Objects
	Log      *slog.Logger

	local *client
	// remote contains the connections to members by client URL.
	remote map[string]*client
	memory
	renewed time.Time
}

// Run runs until ctx ends.
func (c *Care) Run(ctx context.Context) error {
	var err error
	if c.local, err = dial(c.TLS, c.Endpoint); err != nil {
		return err
	}
	c.remote = map[string]*client{}
	defer func() {
		c.forget()
		_ = c.local.Close()
	}()
	for {
		pause := c.look(ctx)
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-c.Objects.Changed():
			timer.Stop()
		case <-timer.C:
		}
	}
}

// forget drops the observations of a former leader.
func (c *Care) forget() {
	for _, r := range c.remote {
		_ = r.Close()
	}
	clear(c.remote)
	c.memory, c.renewed = memory{}, time.Time{}
}

// look manages etcd once, and returns the time of the next call.
func (c *Care) look(ctx context.Context) time.Duration {
	now := time.Now()
	self, leads := c.leads(ctx)
	if !leads {
		c.forget()
		return followPeriod
	}
	if c.led.IsZero() {
		c.Log.Info("This machine manages etcd now", "member", hexID(self))
		c.memory = memory{
			unstarted: map[uint64]time.Time{}, approved: map[string]time.Time{}, failing: map[uint64]time.Time{},
			learning: map[uint64]time.Time{}, defragments: map[uint64]time.Time{}, led: now,
		}
	}
	v, err := c.view(ctx, self, now)
	if err != nil {
		c.Log.Warn("Cannot manage etcd; the agent tries again", "error", err)
		return retryPause
	}
	err = c.publish(ctx, v)
	a := decide(v)
	if err != nil {
		c.Log.Warn("Cannot report the members of etcd; the agent tries again", "error", err)
		a = mendSpace(v) // An etcd without space refuses the writes of the API server, too.
	}
	switch {
	case a.kind != actNone:
	case err != nil:
		return retryPause
	default:
		return c.pause(v)
	}
	if err := c.do(ctx, v, a); err != nil {
		c.Log.Warn("Changing etcd failed; the agent tries again", "action", a.kind, "member", a.member.Name, "id", hexID(a.member.ID), "why", a.why, "error", err)
		return retryPause
	}
	c.Log.Info("etcd changed", "action", a.kind, "member", a.member.Name, "id", hexID(a.member.ID), "why", a.why)
	return 0
}

// leads returns whether the local member leads, and its id.
func (c *Care) leads(ctx context.Context) (uint64, bool) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	s, err := c.local.Status(ctx, c.Endpoint)
	if err != nil {
		return 0, false
	}
	return s.Header.MemberId, s.Leader == s.Header.MemberId
}

// view reads etcd's members and alarms, and the state of each member. It reads the objects first: a member that was added before its object
// got spec.leave must not be missing, because it would count as removed.
func (c *Care) view(ctx context.Context, self uint64, now time.Time) (view, error) {
	objects := c.Objects.List()
	members, err := c.local.members(ctx)
	if err != nil {
		return view{}, err
	}
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	alarms, err := c.local.AlarmList(call)
	if err != nil {
		return view{}, fmt.Errorf("listing etcd's alarms: %w", err)
	}
	c.probe(ctx, members)
	known := map[uint64]bool{}
	v := view{now: now, self: self, members: members, objects: objects, memory: c.memory}
	for i, m := range members {
		known[m.ID] = true
		members[i].Alarms = alarmsOf(alarms.Alarms, m.ID)
		note(c.unstarted, m.ID, !m.Started(), now)
		note(c.failing, m.ID, m.Started() && m.Err != nil, now)
		note(c.learning, m.ID, m.Learner && v.healthy(m), now)
	}
	for _, a := range alarms.Alarms {
		if !known[a.MemberID] && a.Alarm == etcdserverpb.AlarmType_NOSPACE {
			v.former = append(v.former, Member{ID: a.MemberID})
		}
	}
	for _, times := range []map[uint64]time.Time{c.unstarted, c.failing, c.learning, c.defragments} {
		maps.DeleteFunc(times, func(id uint64, _ time.Time) bool { return !known[id] })
	}
	return v, nil
}

// note records the time since when a state lasts.
func note[K comparable](times map[K]time.Time, key K, is bool, now time.Time) {
	if !is {
		delete(times, key)
	} else if _, known := times[key]; !known {
		times[key] = now
	}
}

// probe checks all members at the same time.
func (c *Care) probe(ctx context.Context, members []Member) {
	used := map[string]bool{}
	var wait sync.WaitGroup
	for i := range members {
		m := &members[i]
		if len(m.ClientURLs) == 0 {
			m.Err = errNotProbed
			continue
		}
		url := m.ClientURLs[0]
		used[url] = true
		conn := c.remote[url]
		if conn == nil {
			var err error
			if conn, err = dial(c.TLS, url); err != nil {
				m.Err = err
				continue
			}
			c.remote[url] = conn
		}
		wait.Go(func() { m.Probe = conn.probe(ctx, url) })
	}
	wait.Wait()
	for url, conn := range c.remote {
		if !used[url] {
			_ = conn.Close()
			delete(c.remote, url)
		}
	}
}

// publish creates the missing objects of members, and writes changes.
func (c *Care) publish(ctx context.Context, v view) error {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	if err := c.renew(ctx, v.now); err != nil {
		return err
	}
	for _, m := range v.members {
		if _, found := v.object(m); found || !m.Started() || len(m.PeerURLs) == 0 || len(m.ClientURLs) == 0 {
			continue
		}
		spec := etcdv1.EtcdMemberSpec{PeerURL: m.PeerURLs[0], ClientURL: m.ClientURLs[0]}
		if err := c.Objects.Create(ctx, m.Name, spec); err != nil {
			return fmt.Errorf("creating EtcdMember %s: %w", m.Name, err)
		}
		c.Log.Info("EtcdMember made", "member", m.Name)
	}
	for _, name := range slices.Sorted(maps.Keys(v.objects)) {
		o := v.objects[name]
		want := v.status(o)
		if differs(o.Status, want) {
			if err := c.Objects.ApplyStatus(ctx, name, want); err != nil {
				return fmt.Errorf("writing the status of EtcdMember %s: %w", name, err)
			}
		}
		note(c.approved, name, apimeta.IsStatusConditionTrue(want.Conditions, etcdv1.LeavingCondition), v.now)
	}
	return nil
}

// renew renews the Lease if it is time.
func (c *Care) renew(ctx context.Context, now time.Time) error {
	if now.Sub(c.renewed) < etcdv1.CareLeaseRenewal {
		return nil
	}
	if err := c.Objects.RenewLease(ctx, c.Name, now); err != nil {
		return fmt.Errorf("renewing the Lease %s/%s: %w", etcdv1.CareLeaseNamespace, etcdv1.CareLeaseName, err)
	}
	c.renewed = now
	return nil
}

// renewWhile renews the Lease until f returns, unless confirm returns an error. f changes a member for minutes, and without the Lease etcd
// would count as unmanaged. The states of the members stay: the member does not serve meanwhile, and it is not ill.
func (c *Care) renewWhile(ctx context.Context, confirm func(context.Context) error, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	tick := time.NewTicker(etcdv1.CareLeaseRenewal)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			return err
		case now := <-tick.C:
			call, cancel := context.WithTimeout(ctx, publishTimeout)
			err := confirm(call)
			if err == nil {
				err = c.renew(call, now)
			}
			if err != nil {
				c.Log.Warn("Cannot report that the agent manages etcd; the agent tries again", "error", err)
			}
			cancel()
		}
	}
}

// confirm checks all members again. It returns an error unless the states that v reports are still true, except that of a busy member.
func (c *Care) confirm(ctx context.Context, v view, busy Member) error {
	members := slices.Clone(v.members)
	c.probe(ctx, members)
	return v.confirmedBy(members, busy)
}

// do performs the action, if the local member still leads.
func (c *Care) do(ctx context.Context, v view, a action) error {
	if self, leads := c.leads(ctx); !leads || self != v.self {
		return fmt.Errorf("another member leads now")
	}
	timeout := changeTimeout
	switch a.kind {
	case actDefragment:
		timeout = defragTimeout
	case actCompact, actMoveLeader, actDisarm:
		timeout = callTimeout
	case actRemove, actPromote, actNone:
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var err error
	switch a.kind {
	case actRemove:
		_, err = c.local.MemberRemove(ctx, a.member.ID)
	case actMoveLeader:
		_, err = c.local.MoveLeader(ctx, a.member.ID)
	case actPromote:
		_, err = c.local.MemberPromote(ctx, a.member.ID)
	case actCompact:
		_, err = c.local.Compact(ctx, a.member.Revision, clientv3.WithCompactPhysical())
		if errors.Is(err, rpctypes.ErrCompacted) { // by an attempt whose answer did not come in time
			err = nil
		}
		if err == nil {
			c.compacted, c.compactedRevision = v.now, a.member.Revision
		}
	case actDefragment:
		c.defragments[a.member.ID] = v.now
		url := a.member.ClientURLs[0]
		conn := c.remote[url] // The probes of confirm change the map.
		confirm := func(ctx context.Context) error { return c.confirm(ctx, v, a.member) }
		err = c.renewWhile(ctx, confirm, func() error {
			_, err := conn.Defragment(ctx, url)
			return err
		})
		if err != nil { // The next compaction repeats a defragmentation for space.
			c.compactedRevision = 0
		}
	case actDisarm:
		_, err = c.local.AlarmDisarm(ctx, &clientv3.AlarmMember{MemberID: a.member.ID, Alarm: etcdserverpb.AlarmType_NOSPACE})
	case actNone:
	}
	return err
}

// pause returns the pause before the next call of look.
func (c *Care) pause(v view) time.Duration {
	underWay := func() bool {
		for _, m := range v.members {
			if m.Learner || !m.Started() || v.leaving(m) || m.Err != nil && v.now.Sub(v.failing[m.ID]) < 2*unreachableAfter {
				return true
			}
		}
		return slices.ContainsFunc(slices.Collect(maps.Values(v.objects)), func(o etcdv1.EtcdMember) bool {
			return !o.Spec.Leave && o.Status.MemberID == ""
		})
	}
	switch {
	case !underWay():
		c.busySince = time.Time{}
		return carePeriod
	case c.busySince.IsZero():
		c.busySince = v.now
	}
	if v.now.Sub(c.busySince) > busyTime {
		return carePeriod
	}
	return busyPeriod
}
