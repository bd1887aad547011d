package machine

import (
	"sync"

	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/expiry"
)

// remembered is the state of this process that the cache does not contain, or not yet: machines that wait, and recent decisions. Without
// these decisions, two workers could give one address, or one part of a host, to two machines. drop removes the entries of a machine whose
// object is gone.
type remembered struct {
	// unplaced are the machines, by client.ObjectKey, that ask hosts for room or were refused: room that appears is an event for all
	// of them. A machine with a chosen host is not among them while it waits for its turn, because there can be thousands.
	unplaced sync.Map
	// placing is held while a host is chosen and a part of it promised.
	placing sync.Mutex
	// reserved are the addresses that were chosen and that the cache does not show yet.
	reserved reservations
	// chosen are the hosts that were chosen and that the cache does not show yet.
	chosen choices
	// promises are those of hosts to machines that no host shows yet.
	promises promises
	// created are the volumes that this process has created and that the cache does not show yet.
	created createdVolumes
	// earlier are the volumes that an earlier manager has created and that the cache does not show yet.
	earlier earlierVolumes
	// waiting are the machines without a turn.
	waiting turnWaits
}

// drop removes all entries of a machine whose object is gone, also the promises of hosts to it.
func (r *Reconciler) drop(machine client.ObjectKey) {
	r.takeBack(machine)
	r.unplaced.Delete(machine)
	r.waiting.end(machine)
	r.reserved.release(machine)
	r.chosen.release(machine)
	r.created.release(machine)
	expiry.Forget(infrav1.MachineKind, machine.Namespace, machine.Name)
}

// dropPredecessor drops an object that had the name of this one before. The deletion of the one and the creation of the other can be one
// event.
func (r *Reconciler) dropPredecessor(m *infrav1.CapstanMachine) {
	key := client.ObjectKeyFromObject(m)
	if p, ok := r.promises.get(key); ok && p.uid != m.UID {
		r.drop(key)
	}
}
