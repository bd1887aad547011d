package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/changes"
	"capstan.dev/capstan/internal/foreignfile"
	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/balancer"
	"capstan.dev/capstan/internal/host/boundedfolder"
	"capstan.dev/capstan/internal/host/cgroup"
	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/proc"
)

// loadBalancer is a cluster's load balancer: its process, which outlives capstand, and the goroutine (run) that starts,
// watches and restarts the process.
type loadBalancer struct {
	host *balancers
	id   string
	dir  string
	log  *slog.Logger

	deleted context.Context
	delete  context.CancelFunc
	gone    chan struct{}

	// described is closed when the owner of a load balancer without a readable record has described it. It is nil for other
	// load balancers. The host's mu guards it.
	described chan struct{}
	// halfChanged: the last change failed, so the record and the configuration can be the old or the new ones. The host's mu guards it.
	halfChanged bool

	// files is held while the folder of the process changes. It is taken before mu, which is not held during a write to the disk: readers
	// of the status wait for mu.
	files sync.Mutex

	// mu guards the fields below. spec and listen change only while the host's mu is held too.
	mu   sync.Mutex
	spec *hostpb.LoadBalancer
	// listen holds the spec's listen addresses with the gateway filled in.
	listen []string
	status balancer.Status
	// message explains why no process runs.
	message string
	// holds: the host has the virtual address. virtualMessage explains why it cannot have it.
	holds          bool
	virtualMessage string
	// forgotten: its deletion is published. A later event would show it again.
	forgotten bool
}

func newLoadBalancer(h *balancers, spec *hostpb.LoadBalancer, listen []string) *loadBalancer {
	lb := &loadBalancer{
		host: h, id: spec.Id, spec: spec, listen: listen, dir: h.store.path(balancersDir, spec.Id),
		log:  h.log.With("balancer", spec.Namespace+"/"+spec.Name, "id", spec.Id),
		gone: make(chan struct{}),
	}
	lb.deleted, lb.delete = context.WithCancel(context.Background())
	if atomicfile.Exists(filepath.Join(lb.dir, "deleted")) {
		lb.delete()
	}
	return lb
}

// shared is the only folder that the balancer's process can write to.
func (lb *loadBalancer) shared() string  { return filepath.Join(lb.dir, "shared") }
func (lb *loadBalancer) logPath() string { return filepath.Join(lb.dir, "balancer.log") }
func (lb *loadBalancer) cgroup() cgroup.Group {
	return lb.host.cgroup(admission.BalancerCgroup + lb.id)
}

// configure writes the process's configuration for the spec, which the process watches.
func (lb *loadBalancer) configure() error {
	lb.files.Lock()
	defer lb.files.Unlock()
	lb.mu.Lock()
	spec, listen := lb.spec, lb.listen
	lb.mu.Unlock()
	return lb.writeConfig(spec, listen)
}

// reconfigure writes the configuration for a new spec, and makes it the spec after that.
func (lb *loadBalancer) reconfigure(spec *hostpb.LoadBalancer, listen []string) error {
	lb.files.Lock()
	defer lb.files.Unlock()
	if err := lb.writeConfig(spec, listen); err != nil {
		return err
	}
	lb.change(func() { lb.spec, lb.listen = spec, listen })
	return nil
}

// writeConfig writes the configuration for a spec; lb.files is held.
func (lb *loadBalancer) writeConfig(spec *hostpb.LoadBalancer, listen []string) error {
	config := balancer.Config{Listen: listen, Roaming: roaming(spec), Backends: []balancer.Backend{}}
	for _, b := range spec.Backends {
		config.Backends = append(config.Backends, balancer.Backend{Name: b.Name, Address: b.Address})
	}
	if err := os.Mkdir(lb.shared(), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := os.Chown(lb.shared(), lb.host.config.BalancerUID, lb.host.config.BalancerUID); err != nil {
		return err
	}
	return atomicfile.WriteJSON(filepath.Join(lb.shared(), balancer.ConfigFile), config, 0o644)
}

// sharedLimits bound what the process of a balancer can write into its folder: its configuration, its status, and three sockets.
var sharedLimits = boundedfolder.Limits{Bytes: 1 << 20, Files: 64}

// renewShared makes the folder of the process anew while no process of the balancer runs. A process keeps its folder, because the processes of
// a balancer hand over their connections through it.
func (lb *loadBalancer) renewShared() error {
	lb.cgroup().RemoveEmpty()
	if atomicfile.Exists(lb.startMark()) || lb.cgroup().Exists() {
		return nil
	}
	lb.files.Lock()
	defer lb.files.Unlock()
	if err := lb.removeShared(); err != nil {
		return err
	}
	return boundedfolder.Make(lb.shared(), lb.host.config.BalancerUID, sharedLimits)
}

// startMark exists from the start of a process until its cgroup shows it. If capstand is killed in between, the process may run.
func (lb *loadBalancer) startMark() string { return filepath.Join(lb.dir, startMarkFile) }

const startMarkFile = "starting"

// removeStartMarks removes those of all balancers.
func (s store) removeStartMarks() (err error) {
	for _, id := range folders(s.path(balancersDir)) {
		err = errors.Join(err, atomicfile.Remove(s.path(balancersDir, id, startMarkFile)))
	}
	return err
}

// removeShared removes the folder of the process. That of a process which an earlier version started is on the disk.
func (lb *loadBalancer) removeShared() error {
	if err := boundedfolder.Unmount(lb.shared()); err != nil {
		return err
	}
	if atomicfile.Remove(lb.shared()) == nil {
		return nil
	}
	return lb.host.store.discard(lb.shared())
}

// runWhenDescribed runs the load balancer, after its owner has described it. The channel is nil if its record was readable.
func (lb *loadBalancer) runWhenDescribed(ctx context.Context, described <-chan struct{}) {
	if described != nil {
		select {
		case <-ctx.Done():
		case <-lb.deleted.Done():
		case <-described:
		}
	}
	lb.run(ctx)
}

// run keeps the process running until the load balancer is deleted or capstand ends.
func (lb *loadBalancer) run(ctx context.Context) {
	life, end := context.WithCancel(ctx)
	defer end()
	defer context.AfterFunc(lb.deleted, end)()
	var pause time.Duration
	for attempt := 0; rest(life, nil, pause); attempt++ {
		started := time.Now()
		err := lb.live(life)
		if life.Err() != nil {
			break
		}
		if time.Since(started) > maxRestartDelay {
			attempt = 0
		}
		pause = pauseAfter(attempt - 1) // The first restart is immediate: the process was probably killed.
		lb.log.Warn("Balancer process ended", "error", err, "restartIn", pause)
		lb.setMessage(fmt.Sprintf("the balancer's process ended (%v); started again after %s", err, pause))
	}
	if lb.deleted.Err() == nil {
		return
	}
	if removed := removeFinally(ctx, lb.remove, func(err error) {
		lb.log.Error("Cannot remove the load balancer; capstand tries again", "error", err)
		lb.setMessage("removal: " + err.Error())
	}); removed {
		close(lb.gone)
	}
}

// live adopts or starts the process, and watches it until it ends.
func (lb *loadBalancer) live(life context.Context) error {
	if err := lb.serve(); err != nil {
		return err
	}
	process, err := lb.find()
	if errors.Is(err, proc.ErrGone) {
		process, err = nil, lb.renewShared()
	}
	if err != nil {
		return err
	}
	defer func() { _ = process.Close() }()
	if err := lb.configure(); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(life)
	defer stop()
	changed := changes.Of(ctx, filepath.Join(lb.shared(), balancer.StatusFile))
	log, err := openLog(lb.logPath())
	if err != nil {
		return err
	}
	_ = log.Close() // It was only created for the watch.
	go capLog(ctx, lb.logPath(), lb.log)
	if process != nil {
		process = lb.renew(life, process, changed)
	} else if process, err = lb.start(); err != nil {
		return err
	}
	lb.setMessage("")
	lb.readStatus()
	ended := make(chan error, 1)
	go func() { ended <- process.Wait(life) }()
	for reports := newReportLimit(); ; {
		select {
		case err := <-ended:
			return err
		case <-changed:
			if reports.Wait(life) == nil {
				lb.readStatus()
			}
		}
	}
}

// find returns the running process, or ErrGone if there is none. The status file contains its process id. The id is used
// only if the process runs as the balancer's user, because the balancer can write any id and capstand may kill the process.
func (lb *loadBalancer) find() (*proc.Handle, error) {
	status, err := lb.reported()
	if err != nil || !status.Process.Alive() {
		return nil, proc.ErrGone
	}
	info, err := os.Stat(fmt.Sprintf("/proc/%d", status.Process.PID))
	if err != nil || int(info.Sys().(*syscall.Stat_t).Uid) != lb.host.config.BalancerUID {
		return nil, proc.ErrGone
	}
	return status.Process.Open()
}

// maxReport is the size of the largest status of a balancer, in bytes. Its process is less privileged than capstand.
const maxReport = 64 << 10

// reported reads the status that the balancer has written.
func (lb *loadBalancer) reported() (balancer.Status, error) {
	var status balancer.Status
	err := foreignfile.ReadJSON(lb.shared(), balancer.StatusFile, maxReport, &status)
	status.Message = oneLine(status.Message, maxMessage)
	return status, err
}

// renewTime is the longest time until a new process takes over.
const renewTime = 20 * time.Second

// renew replaces a process whose program is not capstand's own, after an upgrade of capstand, by a new process. The two
// processes hand over by themselves (package balancer), so capstand may die at any time: the status names the process that
// serves. The old process finishes its connections; it is in the same cgroup and is removed with it. If the new process does
// not take over, the old one continues.
func (lb *loadBalancer) renew(life context.Context, old *proc.Handle, changed <-chan struct{}) *proc.Handle {
	if !old.Outdated() {
		return old
	}
	next, err := lb.start()
	if err != nil {
		lb.log.Warn("The balancer keeps its old program", "error", err)
		return old
	}
	ctx, cancel := context.WithTimeout(life, renewTime)
	defer cancel()
	if err := lb.awaitFollowed(ctx, next, changed); err != nil {
		lb.log.Warn("The balancer keeps its old program; stop the process when its connections may end", "pid", old.PID, "error", err)
		_, _ = next.Signal(unix.SIGKILL), next.Close()
		return old
	}
	lb.log.Info("Balancer process replaced", "pid", next.PID, "oldPID", old.PID)
	_ = old.Close()
	return next
}

// awaitFollowed returns when the process has written the status, or with an error when the process has ended.
func (lb *loadBalancer) awaitFollowed(ctx context.Context, next *proc.Handle, changed <-chan struct{}) error {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	var waited error
	go func() { defer close(ended); waited = next.Wait(ctx) }()
	defer func() { cancel(); <-ended }() // Only one goroutine at a time can wait for a handle.
	for {
		if status, err := lb.reported(); err == nil && status.Process == next.Ref {
			return nil
		}
		select {
		case <-ended:
			return fmt.Errorf("the new balancer process did not take over; balancer.log in the load balancer's folder has the cause: %w", cmp.Or(waited, proc.ErrGone))
		case <-changed:
		}
	}
}

// start starts the process without privileges, except for ports below 1024, in its own session and cgroup. Descriptor 3 is
// its folder; it inherits nothing else from capstand.
func (lb *loadBalancer) start() (*proc.Handle, error) {
	shared, err := os.Open(lb.shared())
	if err != nil {
		return nil, err
	}
	defer func() { _ = shared.Close() }()
	log, err := openLog(lb.logPath())
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	uid := uint32(lb.host.config.BalancerUID)
	cmd := exec.Command("/proc/self/exe", append([]string{"balancer", "--config", "/proc/self/fd/3/" + balancer.ConfigFile}, lb.host.config.Logging...)...)
	cmd.Args[0], cmd.Env, cmd.Dir = "capstand", []string{}, "/"
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = log, log, []*os.File{shared}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:      true,
		Credential:  &syscall.Credential{Uid: uid, Gid: uid},
		AmbientCaps: []uintptr{unix.CAP_NET_BIND_SERVICE},
	}
	if err := os.WriteFile(lb.startMark(), nil, 0o600); err != nil {
		return nil, err
	}
	ref, err := proc.Start(cmd)
	if err != nil {
		return nil, fmt.Errorf("starting the balancer process: %w", err)
	}
	if err := lb.cgroup().Add(ref.PID); err != nil {
		lb.log.Warn("The balancer process has no cgroup of its own", "error", err)
	} else if err := os.Remove(lb.startMark()); err != nil {
		lb.log.Warn("The folder of the balancer is not made anew", "error", err)
	}
	lb.log.Info("Balancer process started", "pid", ref.PID)
	return ref.Open()
}

// serve gives the network's bridge the addresses that the balancer listens on, unless another capstand of the box has got the load balancer.
func (lb *loadBalancer) serve() error {
	lb.host.mu.Lock()
	defer lb.host.mu.Unlock()
	return lb.host.networks.serveAgain(lb.spec, lb.listen)
}

// remove ends the process, takes its addresses from the bridge, and removes its files.
func (lb *loadBalancer) remove(ctx context.Context) error {
	if process, err := lb.find(); err == nil {
		err := errors.Join(process.Signal(unix.SIGKILL), process.Wait(ctx), process.Close())
		if err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := lb.cgroup().Remove(ctx); err != nil {
		return err
	}
	if err := lb.host.networks.unserve(ctx, lb.currentSpec()); err != nil {
		return err
	}
	if err := lb.removeShared(); err != nil {
		return err
	}
	if err := lb.host.store.discard(lb.dir); err != nil {
		return err
	}
	lb.host.forget(lb)
	return nil
}

func (lb *loadBalancer) setMessage(message string) {
	lb.change(func() {
		lb.message = message
		if message != "" {
			lb.status = balancer.Status{}
		}
	})
}

func (lb *loadBalancer) readStatus() {
	status, err := lb.reported()
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			lb.log.Error("Cannot read the status of the balancer", "error", err)
		}
		return
	}
	if !status.Process.Alive() {
		return // The status is from the previous process.
	}
	lb.change(func() { lb.status = status })
}

// currentSpec returns a copy of the last accepted spec.
func (lb *loadBalancer) currentSpec() *hostpb.LoadBalancer {
	lb.mu.Lock()
	defer lb.mu.Unlock()
	return proto.CloneOf(lb.spec)
}

// change changes the state of the load balancer and informs watchers.
func (lb *loadBalancer) change(f func()) {
	lb.mu.Lock()
	defer lb.mu.Unlock()
	before := lb.snapshotLocked()
	f()
	if after := lb.snapshotLocked(); !lb.forgotten && !proto.Equal(before, after) {
		lb.host.broadcaster.Publish(events.LoadBalancer(hostpb.Event_CHANGED, after))
	}
}

// publishDeletion publishes the last event of the load balancer.
func (lb *loadBalancer) publishDeletion() {
	lb.mu.Lock()
	defer lb.mu.Unlock()
	lb.forgotten = true
	lb.host.broadcaster.Publish(events.LoadBalancer(hostpb.Event_DELETED, lb.snapshotLocked()))
}

func (lb *loadBalancer) snapshot() *hostpb.LoadBalancer {
	lb.mu.Lock()
	defer lb.mu.Unlock()
	return lb.snapshotLocked()
}

func (lb *loadBalancer) snapshotLocked() *hostpb.LoadBalancer {
	out := proto.CloneOf(lb.spec)
	out.Message = lb.message
	if lb.status.Message != "" {
		out.Message = lb.status.Message
	}
	lb.fillVirtualAddress(out)
	out.Serving = len(lb.status.Listening) > 0 && out.Message == ""
	for _, b := range out.Backends {
		b.Healthy = slices.Contains(lb.status.Healthy, b.Address)
	}
	return out
}
