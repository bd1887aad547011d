package machine

import (
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections"
)

// promises are the parts of hosts that this process has promised to machines, and the hosts that it has called to make them, until the host
// shows the machine or the object of the machine is gone. A connection knows its promises by the ids of machines, which are lost with the
// object.
type promises struct {
	mu sync.Mutex
	of map[client.ObjectKey]promise
}

// promise names the object, the host and the machine of a promise.
type promise struct {
	uid      types.UID
	host, id string
}

func promiseTo(m *infrav1.CapstanMachine) promise {
	return promise{m.UID, m.Spec.HostName, m.Spec.ID}
}

func (p *promises) note(m *infrav1.CapstanMachine) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.of == nil {
		p.of = map[client.ObjectKey]promise{}
	}
	p.of[client.ObjectKeyFromObject(m)] = promiseTo(m)
}

// get returns the promise to the object of a name, which can be an older object than the current one.
func (p *promises) get(machine client.ObjectKey) (promise, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	found, ok := p.of[machine]
	return found, ok
}

func (p *promises) end(machine client.ObjectKey) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.of, machine)
}

// promise sets a part of the machine's host aside until the host has the machine, or until takeBack.
func (r *Reconciler) promise(m *infrav1.CapstanMachine, host *connections.Host, part connections.Resources) {
	r.promises.note(m)
	host.Promise(m.Spec.ID, part)
}

// takeBack takes back what was promised to a machine that the host will not make.
func (r *Reconciler) takeBack(machine client.ObjectKey) {
	p, ok := r.promises.get(machine)
	if !ok {
		return
	}
	r.promises.end(machine)
	if host := r.Pool.Get(p.host); host != nil {
		host.Release(p.id)
	}
}

// called reports whether this process may have called the host of the machine to make it, without seeing the result. A request can have an
// effect after its end for the caller.
func (r *Reconciler) called(m *infrav1.CapstanMachine) bool {
	p, ok := r.promises.get(client.ObjectKeyFromObject(m))
	return ok && p == promiseTo(m)
}
