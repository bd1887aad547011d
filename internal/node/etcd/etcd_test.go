package etcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	"capstan.dev/capstan/internal/node/backup"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
	"capstan.dev/capstan/internal/testenv/ports"
)

// pool is an etcd cluster of real processes on the loopback interface, each with its own Care, and the
// EtcdMembers that they share.
type pool struct {
	t       *testing.T
	dir     string
	program string
	extra   []string
	objects *memoryObjects
	members map[string]*process
}

func newPool(t *testing.T, extra ...string) *pool {
	t.Helper()
	assets, err := testenv.Assets()
	expect.NoError(t, err)
	p := &pool{t: t, dir: t.TempDir(), program: filepath.Join(assets, "etcd"), extra: extra, members: map[string]*process{}}
	p.objects = &memoryObjects{items: map[string]etcdv1.EtcdMember{}, watchers: map[chan struct{}]bool{}}
	expect.NoError(t, certfiles.EnsureAuthority(p.dir, "etcd/ca", "etcd", time.Now()))
	for _, leaf := range []certfiles.Leaf{
		{Name: "etcd/server", CA: "etcd/ca", Leaf: pki.Leaf{CommonName: "member", IPs: []net.IP{net.IPv4(127, 0, 0, 1)}, Usages: pki.Both}},
		{Name: "etcd/healthcheck-client", CA: "etcd/ca", Leaf: pki.Leaf{CommonName: "kube-etcd-healthcheck-client", Usages: pki.Client}},
	} {
		_, err := leaf.Ensure(p.dir, time.Hour, time.Now())
		expect.NoError(t, err)
	}
	return p
}

// process is one member.
type process struct {
	*pool
	name, client, peer, data string
	// wal is the folder of the log; empty if it is in data.
	wal string

	mu             sync.Mutex
	cmd            *exec.Cmd
	exited         chan struct{}
	initialCluster string
	starts         int
}

// member reserves the addresses of a member; its etcd does not run yet.
func (p *pool) member(name string) *process {
	p.t.Helper()
	m := &process{pool: p, name: name, data: filepath.Join(p.dir, name), client: "https://" + ports.Address(p.t), peer: "https://" + ports.Address(p.t)}
	p.members[name] = m
	p.t.Cleanup(m.kill)
	return m
}

// start starts etcd; with another initial cluster it starts it again.
func (m *process) start(initialCluster, state string) error {
	m.mu.Lock()
	running := m.cmd != nil && m.initialCluster == initialCluster
	m.mu.Unlock()
	if running {
		return nil
	}
	m.kill()
	m.mu.Lock()
	defer m.mu.Unlock()
	file := func(name string) string { return filepath.Join(m.dir, "etcd", name) }
	args := append([]string{
		"--name=" + m.name, "--data-dir=" + m.data, "--listen-client-urls=" + m.client, "--advertise-client-urls=" + m.client,
		"--listen-peer-urls=" + m.peer, "--initial-advertise-peer-urls=" + m.peer, "--initial-cluster=" + initialCluster,
		"--initial-cluster-state=" + state, "--initial-cluster-token=test", "--max-learners=4", "--client-cert-auth=true", "--peer-client-cert-auth=true",
		"--trusted-ca-file=" + file("ca.crt"), "--cert-file=" + file("server.crt"), "--key-file=" + file("server.key"),
		"--peer-trusted-ca-file=" + file("ca.crt"), "--peer-cert-file=" + file("server.crt"), "--peer-key-file=" + file("server.key"),
		"--unsafe-no-fsync", "--log-level=warn",
	}, m.extra...)
	if m.wal != "" {
		args = append(args, "--wal-dir="+m.wal)
	}
	cmd := exec.Command(m.program, args...)
	log, err := os.OpenFile(m.data+".log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return err
	}
	exited := make(chan struct{})
	go func() { _ = cmd.Wait(); close(exited) }()
	m.cmd, m.exited, m.initialCluster = cmd, exited, initialCluster
	m.starts++
	return nil
}

// kill sends SIGKILL to etcd.
func (m *process) kill() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.cmd == nil {
		return
	}
	_ = m.cmd.Process.Kill()
	<-m.exited
	m.cmd = nil
}

func (m *process) again() error {
	m.kill()
	return m.start(m.initialCluster, "existing")
}

func (p *pool) connect(members ...*process) *client {
	p.t.Helper()
	config, err := TLS(p.dir)
	expect.NoError(p.t, err)
	var urls []string
	for _, m := range members {
		urls = append(urls, m.client)
	}
	c, err := dial(config, urls...)
	expect.NoError(p.t, err)
	p.t.Cleanup(func() { _ = c.Close() })
	return c
}

// care runs the member's Care and, when the member leaves, stops the API server as the machine's agent does.
func (m *process) care() {
	config, err := TLS(m.dir)
	expect.NoError(m.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	objects, forget := m.objects.watch()
	care := &Care{Name: m.name, Endpoint: m.client, TLS: config, Objects: objects, Log: m.log()}
	done := make(chan error, 1)
	go func() { done <- care.Run(ctx) }()
	m.t.Cleanup(func() {
		cancel()
		expect.NoError(m.t, <-done)
		forget()
	})
}

// log writes to the output of the test, which go test shows if the test fails.
func (m *process) log() *slog.Logger {
	return slog.New(slog.NewTextHandler(m.t.Output(), nil)).With("agent", m.name)
}

// joining returns the Joining that `node up` uses on the member's machine.
func (m *process) joining(others ...*process) Joining {
	config, err := TLS(m.dir)
	expect.NoError(m.t, err)
	var endpoints []string
	for _, o := range others {
		endpoints = append(endpoints, o.client)
	}
	return Joining{
		Name: m.name, PeerURL: m.peer, DataDir: m.data, WALDir: m.wal, Endpoints: endpoints, Local: m.client, TLS: config, Log: m.log(),
		Start:   func(_ context.Context, cluster string) error { return m.start(cluster, "existing") },
		Restart: func(context.Context) error { return m.again() },
		Wanted:  func(context.Context) error { return m.announce() },
		Others: func(context.Context) (urls []string, _ error) {
			for _, o := range m.objects.all() {
				if o.Status.MemberID == "" && !o.Spec.Leave {
					urls = append(urls, o.Spec.PeerURL)
				}
			}
			return urls, nil
		},
	}
}

func (m *process) announce() error {
	return m.objects.Create(context.Background(), m.name, etcdv1.EtcdMemberSpec{PeerURL: m.peer, ClientURL: m.client})
}

func (m *process) join(others ...*process) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	if err := m.announce(); err != nil {
		return err
	}
	return Join(ctx, m.joining(others...))
}

// first starts the first member.
func (p *pool) first(name string) *process {
	m := p.member(name)
	expect.NoError(p.t, m.start(name+"="+m.peer, "new"))
	m.care()
	p.untilHealthy(name)
	return m
}

// untilHealthy waits until the EtcdMembers of the names, and no others that have not left, are healthy voters.
func (p *pool) untilHealthy(names ...string) {
	p.t.Helper()
	expect.Eventually(p.t, "all members are healthy", func() error {
		var healthy []string
		for name, o := range p.objects.all() {
			if joined := apimeta.FindStatusCondition(o.Status.Conditions, etcdv1.JoinedCondition); joined != nil && joined.Reason == etcdv1.LeftReason {
				continue
			}
			if apimeta.IsStatusConditionTrue(o.Status.Conditions, etcdv1.JoinedCondition) && apimeta.IsStatusConditionTrue(o.Status.Conditions, etcdv1.HealthyCondition) {
				healthy = append(healthy, name)
			}
		}
		slices.Sort(healthy)
		slices.Sort(names)
		if !slices.Equal(healthy, names) {
			return fmt.Errorf("healthy %v, want %v; all: %+v", healthy, names, p.objects.all())
		}
		return nil
	})
}

func (p *pool) untilCondition(name, kind, want string) {
	p.t.Helper()
	expect.Eventually(p.t, kind+" of "+name, func() error {
		c := apimeta.FindStatusCondition(p.objects.all()[name].Status.Conditions, kind)
		if c == nil || string(c.Status)+" "+c.Reason != want {
			return fmt.Errorf("%s of %s: %+v, want %s", kind, name, c, want)
		}
		return nil
	})
}

func (p *pool) leader() string {
	for name, o := range p.objects.all() {
		if o.Status.Leader != nil && *o.Status.Leader {
			return name
		}
	}
	return ""
}

// TestMembership adds, kills and removes members of a real etcd cluster.
func TestMembership(t *testing.T) {
	p := newPool(t)
	a := p.first("a")
	if o := p.objects.all()["a"]; o.Spec.PeerURL != a.peer || o.Spec.ClientURL != a.client || o.Status.MemberID == "" || o.Status.Version == "" || o.Status.DBSizeBytes == nil {
		t.Errorf("the first member's object: %+v", o)
	}

	// Two join at the same time.
	b, c := p.member("b"), p.member("c")
	start := time.Now()
	errs := make(chan error, 2)
	for _, m := range []*process{b, c} {
		m.care()
		go func() { errs <- m.join(a) }()
	}
	expect.NoError(t, errors.Join(<-errs, <-errs))
	t.Logf("two joined after %s", time.Since(start).Round(time.Millisecond))
	p.untilHealthy("a", "b", "c")
	if p.members["b"].starts > 6 || p.members["c"].starts > 6 {
		t.Errorf("etcd started %d and %d times, want once each", p.members["b"].starts, p.members["c"].starts)
	}

	// The leader leaves; its machine stops its API server in between.
	leader := p.leader()
	start = time.Now()
	p.objects.leave(leader)
	p.untilCondition(leader, etcdv1.LeavingCondition, "True Approved")
	p.objects.stopServing(leader)
	p.untilCondition(leader, etcdv1.JoinedCondition, "False Left")
	t.Logf("the leader left after %s", time.Since(start).Round(time.Millisecond))
	var rest []string
	for name := range p.members {
		if name != leader {
			rest = append(rest, name)
		}
	}
	p.untilHealthy(rest...)

	// The removal of a dead machine does not stop the other one.
	dead := p.members[rest[0]]
	d := p.member("d")
	d.care()
	expect.NoError(t, d.join(p.members[rest[1]]))
	p.untilHealthy(rest[0], rest[1], "d")
	dead.kill()
	p.untilCondition(dead.name, etcdv1.HealthyCondition, "False Unreachable")
	if joined := apimeta.IsStatusConditionTrue(p.objects.all()[dead.name].Status.Conditions, etcdv1.JoinedCondition); !joined {
		t.Error("spec.leave is not set")
	}
	p.objects.leave(dead.name)
	p.untilCondition(dead.name, etcdv1.JoinedCondition, "False Left")
	p.untilHealthy(rest[1], "d")

	// One of two members dies: the other has no quorum and must not remove a member.
	p.members[rest[1]].kill()
	p.objects.leave(rest[1])
	expect.NoError(t, p.members[rest[1]].again())
	p.untilCondition(rest[1], etcdv1.LeavingCondition, "True Approved")
	p.objects.stopServing(rest[1])
	p.untilCondition(rest[1], etcdv1.JoinedCondition, "False Left")
	p.untilHealthy("d")
	start = time.Now()
	if _, err := p.connect(d).Put(t.Context(), "alone", "yes"); err != nil {
		t.Errorf("a write to the last member: %v", err)
	}
	t.Logf("a write to the last member took %s", time.Since(start).Round(time.Millisecond))

	// The last member stays, even with spec.leave.
	p.objects.leave("d")
	p.untilCondition("d", etcdv1.LeavingCondition, "False QuorumAtRisk")
	members, err := p.connect(d).members(t.Context())
	if err != nil || len(members) != 1 {
		t.Errorf("%+v, %v", members, err)
	}
	if writes := p.objects.writes(); writes > 400 {
		t.Errorf("%d writes of statuses", writes)
	}
}

// TestJoinAfterCrash: a machine that crashed during a join continues it.
func TestJoinAfterCrash(t *testing.T) {
	p := newPool(t)
	a := p.first("a")
	c := p.connect(a)

	t.Run("after it was added", func(t *testing.T) {
		b := p.member("b")
		add(t, c, b)
		expect.NoError(t, b.join(a))
		p.untilHealthy("a", "b")
	})
	t.Run("when it is a member already", func(t *testing.T) {
		b := p.members["b"]
		pid := b.cmd.Process.Pid
		expect.NoError(t, b.join(a))
		if b.cmd.Process.Pid != pid {
			t.Error("etcd was started again")
		}
	})
	t.Run("members came and went before etcd was started", func(t *testing.T) {
		x := p.member("x")
		added := add(t, c, x)
		expect.NoError(t, x.start("x="+x.peer+",gone=https://127.0.0.1:1", "existing"))
		expect.NoError(t, x.join(a))
		p.untilHealthy("a", "b", "x")
		if i := slices.IndexFunc(added, func(m Member) bool { return !m.Started() }); p.objects.all()["x"].Status.MemberID != hexID(added[i].ID) {
			t.Errorf("member %s, added were %+v", p.objects.all()["x"].Status.MemberID, added)
		}
	})
	t.Run("after it lost its disk", func(t *testing.T) {
		x := p.members["x"]
		before := idOf(t, c, "x")
		x.kill()
		expect.NoError(t, os.RemoveAll(x.data))
		x.initialCluster = ""
		expect.NoError(t, x.join(a, p.members["b"]))
		p.untilHealthy("a", "b", "x")
		if after := idOf(t, c, "x"); after == before {
			t.Error("it came back as the same member, without the entries that it had acknowledged")
		}
	})
	t.Run("after it was removed", func(t *testing.T) {
		x := p.members["x"]
		x.kill()
		x.initialCluster = ""
		remove(t, c, "x")
		expect.NoError(t, x.join(a, p.members["b"]))
		p.untilHealthy("a", "b", "x")
	})
	t.Run("an unstarted member is removed", func(t *testing.T) {
		y := p.member("y")
		expect.NoError(t, y.announce())
		add(t, c, y)
		p.untilCondition("y", etcdv1.JoinedCondition, "False NotStarted")
		p.objects.leave("y")
		p.untilCondition("y", etcdv1.JoinedCondition, "False Left")
		if n := len(members(t, c)); n != 3 {
			t.Errorf("%d members", n)
		}
	})
	t.Run("a learner whose machine died before its promotion", func(t *testing.T) {
		z := p.member("z")
		expect.NoError(t, z.announce())
		expect.NoError(t, z.start(initialCluster(add(t, c, z), "z", z.peer), "existing"))
		p.untilHealthy("a", "b", "x", "z")
	})
}

// meanwhile does something when the objects are read.
type meanwhile struct {
	Objects
	list func() map[string]etcdv1.EtcdMember
}

func (m meanwhile) List() map[string]etcdv1.EtcdMember { return m.list() }

// remove removes a member. etcd refuses that for some seconds after the last change.
func remove(t *testing.T, c *client, name string) {
	t.Helper()
	id := idOf(t, c, name)
	expect.Eventually(t, "the member "+name+" is removed", func() error {
		_, err := c.MemberRemove(t.Context(), id)
		if errors.Is(err, rpctypes.ErrMemberNotFound) {
			return nil // by a request whose answer was lost
		}
		return err
	})
}

// TestJoinWithFormerLog: the log of a member that was removed is on a volume of the next machine, perhaps without the data.
func TestJoinWithFormerLog(t *testing.T) {
	for _, name := range []string{"with the data", "without the data"} {
		t.Run(name, func(t *testing.T) {
			p := newPool(t)
			a := p.first("a")
			c := p.connect(a)
			b := p.member("b")
			b.wal = filepath.Join(p.dir, "log")
			expect.NoError(t, b.join(a))
			p.untilHealthy("a", "b")
			remove(t, c, "b")
			b.kill()
			if name == "without the data" {
				expect.NoError(t, os.RemoveAll(b.data))
			}
			b.initialCluster = ""
			expect.NoError(t, b.join(a))
			if _, err := p.connect(b).Put(t.Context(), "key", "value"); err != nil {
				t.Errorf("a write to the member: %v", err)
			}
		})
	}
}

// TestAddedMeanwhile: a member that was added before its object got spec.leave does not count as removed.
func TestAddedMeanwhile(t *testing.T) {
	p := newPool(t)
	c := p.connect(p.first("a"))
	y := p.member("y")
	care := &Care{
		local: c, remote: map[string]*client{}, memory: memory{unstarted: map[uint64]time.Time{}, failing: map[uint64]time.Time{}, learning: map[uint64]time.Time{}},
		Objects: meanwhile{list: func() map[string]etcdv1.EtcdMember {
			add(t, c, y)
			o := etcdv1.EtcdMember{Spec: etcdv1.EtcdMemberSpec{PeerURL: y.peer, Leave: true}}
			o.Name = "y"
			return map[string]etcdv1.EtcdMember{"y": o}
		}},
	}
	v, err := care.view(t.Context(), idOf(t, c, "a"), time.Now())
	expect.NoError(t, err)
	status := v.status(v.objects["y"])
	if got := apimeta.FindStatusCondition(status.Conditions, etcdv1.JoinedCondition); got == nil || got.Reason != etcdv1.NotStartedReason {
		t.Errorf("%+v, want the reason NotStarted", got)
	}
}

// TestConfirm: a healthy member that does not answer any more makes the reported states invalid.
func TestConfirm(t *testing.T) {
	p := newPool(t)
	a := p.first("a")
	config, err := TLS(p.dir)
	expect.NoError(t, err)
	care := &Care{TLS: config, remote: map[string]*client{}}
	defer care.forget()
	id := idOf(t, p.connect(a), "a")
	member := func(id uint64, url string) Member {
		return Member{ID: id, Name: hexID(id), ClientURLs: []string{url}, Probe: Probe{Leader: id}}
	}
	v := view{now: time.Now(), self: id, members: []Member{member(id, a.client)}}
	expect.NoError(t, care.confirm(t.Context(), v, Member{}))
	silent := member(id+1, "https://"+ports.Address(t))
	silent.Leader = id
	v.members = append(v.members, silent)
	if err := care.confirm(t.Context(), v, Member{}); err == nil {
		t.Error("a member that does not answer is healthy")
	}
	expect.NoError(t, care.confirm(t.Context(), v, silent))
}

// TestSpace: Care frees space on a member that has none left, and shrinks a database file with much free space. The objects are in the same
// etcd, so they cannot be written meanwhile.
func TestSpace(t *testing.T) {
	const quota = 24 << 20
	p := newPool(t, fmt.Sprintf("--quota-backend-bytes=%d", quota), "--auto-compaction-retention=0")
	a := p.first("a")
	c := p.connect(a)
	p.objects.storeIn(func(ctx context.Context) error {
		_, err := c.Put(ctx, "object", "small")
		return err
	})
	value := strings.Repeat("x", 1<<20)
	var err error
	for range 2 * quota >> 20 {
		if _, err = c.Put(t.Context(), "key", value); err != nil {
			break
		}
	}
	if err == nil || !strings.Contains(err.Error(), "database space exceeded") {
		t.Fatalf("the writes did not fill the space: %v", err)
	}
	expect.Eventually(t, "a small write succeeds", func() error {
		_, err := c.Put(t.Context(), "key", "small")
		return err
	})
	expect.Eventually(t, "the space is reclaimed", func() error {
		o := p.objects.all()["a"]
		if !apimeta.IsStatusConditionTrue(o.Status.Conditions, etcdv1.HealthyCondition) || len(o.Status.Alarms) > 0 || *o.Status.DBSizeBytes > quota/2 {
			return fmt.Errorf("%+v, size %d, in use %d", o.Status, *o.Status.DBSizeBytes, *o.Status.DBInUseBytes)
		}
		return nil
	})
}

// TestAlarmInBackup: a backup of an etcd without space has the alarm of a member that the restored etcd does not have. Care disarms it.
func TestAlarmInBackup(t *testing.T) {
	p := newPool(t)
	old, restored, snapshot := p.member("a"), p.member("b"), filepath.Join(p.dir, "snapshot")
	expect.NoError(t, old.start("a="+old.peer, "new"))
	c := p.connect(old)
	expect.Eventually(t, "etcd has the alarm", func() error {
		list, err := c.MemberList(t.Context())
		if err != nil {
			return err
		}
		_, err = etcdserverpb.NewMaintenanceClient(c.ActiveConnection()).Alarm(t.Context(), &etcdserverpb.AlarmRequest{
			Action: etcdserverpb.AlarmRequest_ACTIVATE, MemberID: list.Members[0].ID, Alarm: etcdserverpb.AlarmType_NOSPACE,
		})
		return err
	})
	config, err := TLS(p.dir)
	expect.NoError(t, err)
	expect.NoError(t, backup.Member{Endpoint: old.client, TLS: config}.Snapshot(t.Context(), snapshot, &backup.Manifest{}))
	old.kill()

	first := backup.FirstMember{Name: "b", PeerURL: restored.peer, Token: "restored"}
	expect.NoError(t, first.Restore(t.Context(), filepath.Join(filepath.Dir(p.program), "etcdutl"), snapshot, restored.data))
	expect.NoError(t, restored.start("b="+restored.peer, "new"))
	c = p.connect(restored)
	expect.Eventually(t, "the restored etcd refuses a write", func() error {
		if _, err := c.Put(t.Context(), "key", "value"); !errors.Is(err, rpctypes.ErrNoSpace) {
			return fmt.Errorf("expected an error about space, found %w", err)
		}
		return nil
	})
	restored.care()
	expect.Eventually(t, "a write succeeds", func() error {
		_, err := c.Put(t.Context(), "key", "value")
		return err
	})
}

// add adds a member as its machine does. etcd requires that voters were connected for five seconds.
func add(t *testing.T, c *client, m *process) (all []Member) {
	t.Helper()
	expect.Eventually(t, "the member is added", func() error {
		added, err := c.MemberAddAsLearner(t.Context(), []string{m.peer})
		if err == nil {
			all = membersOf(added.Members)
		}
		return err
	})
	return all
}

func idOf(t *testing.T, c *client, name string) uint64 {
	t.Helper()
	for _, m := range members(t, c) {
		if m.Name == name {
			return m.ID
		}
	}
	return 0
}

func members(t *testing.T, c *client) []Member {
	t.Helper()
	list, err := c.members(t.Context())
	expect.NoError(t, err)
	return list
}

// memoryObjects are EtcdMembers without an API server.
type memoryObjects struct {
	mu       sync.Mutex
	items    map[string]etcdv1.EtcdMember
	watchers map[chan struct{}]bool
	written  int
	// store stores an object where Care must keep space; nil in most tests.
	store func(context.Context) error
}

// watcher is the view of one machine.
type watcher struct {
	*memoryObjects
	changed chan struct{}
}

func (w watcher) Changed() <-chan struct{} { return w.changed }

func (o *memoryObjects) watch() (Objects, func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	changed := make(chan struct{}, 1)
	o.watchers[changed] = true
	return watcher{o, changed}, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		delete(o.watchers, changed)
	}
}

func (o *memoryObjects) change(name string, do func(*etcdv1.EtcdMember)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	item := o.items[name]
	item.Name = name
	do(&item)
	o.items[name] = item
	for changed := range o.watchers {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
}

func (o *memoryObjects) all() map[string]etcdv1.EtcdMember {
	o.mu.Lock()
	defer o.mu.Unlock()
	return maps.Clone(o.items)
}

func (o *memoryObjects) List() map[string]etcdv1.EtcdMember { return o.all() }

func (o *memoryObjects) storeIn(store func(context.Context) error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.store = store
}

func (o *memoryObjects) stored(ctx context.Context) error {
	o.mu.Lock()
	store := o.store
	o.mu.Unlock()
	if store == nil {
		return nil
	}
	return store(ctx)
}

func (o *memoryObjects) Create(_ context.Context, name string, spec etcdv1.EtcdMemberSpec) error {
	o.change(name, func(m *etcdv1.EtcdMember) {
		if m.Spec.PeerURL == "" {
			m.Spec = spec
		}
	})
	return nil
}

func (o *memoryObjects) ApplyStatus(ctx context.Context, name string, status etcdv1.EtcdMemberStatus) error {
	if err := o.stored(ctx); err != nil {
		return err
	}
	o.change(name, func(m *etcdv1.EtcdMember) {
		serving := apimeta.FindStatusCondition(m.Status.Conditions, etcdv1.ServingCondition)
		m.Status = status
		m.Status.Conditions = slices.Clone(status.Conditions)
		if serving != nil {
			m.Status.Conditions = append(m.Status.Conditions, *serving)
		}
		o.written++
	})
	return nil
}

func (o *memoryObjects) RenewLease(ctx context.Context, _ string, _ time.Time) error {
	return o.stored(ctx)
}

func (o *memoryObjects) leave(name string) {
	o.change(name, func(m *etcdv1.EtcdMember) { m.Spec.Leave = true })
}

// stopServing stops the API server as the machine's agent does when its member may leave.
func (o *memoryObjects) stopServing(name string) {
	o.change(name, func(m *etcdv1.EtcdMember) {
		apimeta.SetStatusCondition(&m.Status.Conditions, metav1.Condition{Type: etcdv1.ServingCondition, Status: metav1.ConditionFalse, Reason: etcdv1.StoppedReason})
	})
}

func (o *memoryObjects) writes() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.written
}
