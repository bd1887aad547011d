package hollow

import (
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/client-go/kubernetes"

	"capstan.dev/capstan/internal/host/events"
	"capstan.dev/capstan/internal/host/hostpb"
)

// machine is a machine without anything in it.
type machine struct {
	host   *Host
	ctx    context.Context
	cancel context.CancelFunc
	done   chan struct{}

	mu     sync.Mutex
	record *hostpb.Machine
	client kubernetes.Interface // of the workload cluster, after the Node was registered
	// recorded guards the file, so that an older state does not overwrite a newer one.
	recorded sync.Mutex
}

func newMachine(h *Host, record *hostpb.Machine) *machine {
	ctx, cancel := context.WithCancel(h.ctx)
	return &machine{host: h, ctx: ctx, cancel: cancel, done: make(chan struct{}), record: record}
}

// owner returns the spec, which contains the owner's namespace and name. It is empty if there is no machine.
func (m *machine) owner() *hostpb.MachineSpec {
	if m == nil {
		return nil
	}
	return m.spec()
}

// spec returns the current spec. The value is immutable: an update replaces it.
func (m *machine) spec() *hostpb.MachineSpec {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.record.GetSpec()
}

func (m *machine) snapshot() *hostpb.Machine {
	m.mu.Lock()
	defer m.mu.Unlock()
	return proto.CloneOf(m.record)
}

// update changes the status, first on disk.
func (m *machine) update(change func(*hostpb.MachineStatus)) {
	m.change(func(next *hostpb.Machine) { change(next.Status) })
}

// change changes the machine, first on disk.
func (m *machine) change(change func(*hostpb.Machine)) {
	m.recorded.Lock()
	defer m.recorded.Unlock()
	next := m.snapshot()
	change(next)
	if m.ctx.Err() != nil {
		return // The machine was deleted, or the host stops: the next run continues from the record.
	}
	if err := m.host.store.save(next); err != nil {
		m.host.log.Error("Cannot record the machine", "machine", next.GetSpec().GetName(), "error", err)
	}
	m.mu.Lock()
	m.record = next
	m.mu.Unlock()
	m.host.broadcaster.Publish(events.Machine(hostpb.Event_CHANGED, proto.CloneOf(next)))
}

func (m *machine) setCluster(client kubernetes.Interface) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.client = client
}

func (m *machine) cluster() kubernetes.Interface {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.client
}

// stop ends the machine and waits for its goroutines.
func (m *machine) stop() {
	m.cancel()
	<-m.done
}

// run goes through the life of a machine: it starts, boots, registers its Node, and keeps the Node healthy. After a restart
// of the host it continues from the recorded state.
func (m *machine) run() {
	defer close(m.done)
	b := m.host.config.Behaviour
	status := m.snapshot().GetStatus()
	if status.GetPhase() == hostpb.MachineStatus_FAILED {
		return
	}
	if status.GetPhase() == hostpb.MachineStatus_PENDING {
		if !m.sleep(b.StartDelay) {
			return
		}
		if rand.Float64() < b.FailStart {
			m.end("the machine failed before it ran, because --fail-start is set")
			return
		}
		m.update(func(s *hostpb.MachineStatus) {
			s.Phase, s.Bootstrap, s.StartedAt = hostpb.MachineStatus_RUNNING, hostpb.MachineStatus_STARTED, timestamppb.Now()
		})
	}
	if status.GetBootstrap() != hostpb.MachineStatus_SUCCEEDED && !m.boot(b) {
		return
	}
	m.live(b)
}

// boot waits, and decides whether the bootstrap fails.
func (m *machine) boot(b Behaviour) bool {
	if !m.sleep(b.BootDelay) {
		return false
	}
	if rand.Float64() < b.FailBootstrap {
		m.update(func(s *hostpb.MachineStatus) {
			s.Bootstrap, s.BootstrapMessage = hostpb.MachineStatus_BOOTSTRAP_FAILED, "the bootstrap failed, because --fail-bootstrap is set"
		})
		return false
	}
	return true
}

// live registers the Node and keeps it healthy until the machine fails or is deleted.
func (m *machine) live(b Behaviour) {
	ctx, cancel := context.WithCancel(m.ctx)
	var node sync.WaitGroup
	node.Go(func() { m.beNode(ctx) })
	defer node.Wait()
	defer cancel()
	end := make(<-chan time.Time)
	if b.FailAfter > 0 {
		// Exponential distribution: the probability does not depend on the age of the machine.
		end = time.After(time.Duration(rand.ExpFloat64() * float64(b.FailAfter)))
	}
	select {
	case <-m.ctx.Done():
	case <-end:
		m.end("the machine failed, because --fail-after is set")
	}
}

// bootstrapped erases the bootstrap data and reports that the bootstrap succeeded.
func (m *machine) bootstrapped() {
	_ = os.Remove(filepath.Join(m.host.store.dir(m.spec().GetId()), bootstrapFile))
	m.update(func(s *hostpb.MachineStatus) {
		s.Bootstrap = hostpb.MachineStatus_SUCCEEDED
		s.Services = []*hostpb.ServiceStatus{{Name: "kubelet", State: "ready", Message: "hollow"}}
	})
}

func (m *machine) end(message string) {
	m.update(func(s *hostpb.MachineStatus) {
		s.Phase, s.Message, s.Services = hostpb.MachineStatus_FAILED, message, nil
	})
}

// sleep waits with jitter. It returns false if the machine was stopped.
func (m *machine) sleep(d time.Duration) bool {
	d += time.Duration((rand.Float64()*2 - 1) * m.host.config.Behaviour.Jitter * float64(d))
	select {
	case <-m.ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
