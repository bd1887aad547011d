package controlplane

import (
	"crypto/sha256"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// This file contains the memories of steps. They are lost with the process.

// memory of applied objects and manifests. Without it everything is applied again without an effect.
type memory struct {
	mu   sync.Mutex
	sums map[types.UID][sha256.Size]byte
}

func (m *memory) is(uid types.UID, sum [sha256.Size]byte) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.sums[uid] == sum
}

func (m *memory) set(uid types.UID, sum [sha256.Size]byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.sums == nil || len(m.sums) > 10000 { // Most entries belong to objects that were deleted long ago.
		m.sums = map[types.UID][sha256.Size]byte{}
	}
	m.sums[uid] = sum
}

const (
	// firstPause and longestPause limit the delay after a failed attempt to create a Machine. The last one is also that after a refused
	// change or deletion of Machines.
	firstPause, longestPause = 250 * time.Millisecond, 30 * time.Second
)

// trial is the memory of failed attempts to create a Machine.
type trial struct {
	// name of the Machine. The next attempt uses the same name, so that the same error has the same text.
	name string
	// why is the last error. The next attempt follows at after, or at once for another generation of the spec.
	why        string
	failures   int
	after      time.Time
	generation int64
}

// trials are those of each control plane.
type trials struct {
	mu sync.Mutex
	of map[client.ObjectKey]trial
}

func (a *trials) get(controlPlane *controlplanev1.CapstanControlPlane) trial {
	a.mu.Lock()
	defer a.mu.Unlock()
	found := a.of[client.ObjectKeyFromObject(controlPlane)]
	if found.generation != controlPlane.Generation {
		return trial{generation: controlPlane.Generation}
	}
	return found
}

func (a *trials) set(controlPlane *controlplanev1.CapstanControlPlane, to trial) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.of == nil {
		a.of = map[client.ObjectKey]trial{}
	}
	a.of[client.ObjectKeyFromObject(controlPlane)] = to
}

func (a *trials) forget(key client.ObjectKey) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.of, key)
}

// failed returns the trial after one more failure.
func (a trial) failed(why string, now time.Time) trial {
	a.why, a.after = why, now.Add(min(longestPause, firstPause<<min(a.failures, 10)))
	a.failures++
	return a
}

// sightings contains times by the UIDs of objects: of control planes, or of their Machines. It has them by control plane, so that they
// are forgotten with it.
type sightings struct {
	mu sync.Mutex
	at map[client.ObjectKey]map[types.UID]time.Time
}

func (k *sightings) saw(controlPlane client.ObjectKey, uid types.UID, at time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.of(controlPlane)[uid] = at
}

// last returns the last time of an object. It is now if there was none.
func (k *sightings) last(controlPlane client.ObjectKey, uid types.UID, now time.Time) time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	of := k.of(controlPlane)
	if _, ok := of[uid]; !ok {
		of[uid] = now
	}
	return of[uid]
}

// forgetAllBut forgets the objects of a control plane that are not in left.
func (k *sightings) forgetAllBut(controlPlane client.ObjectKey, left ...types.UID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	maps.DeleteFunc(k.at[controlPlane], func(uid types.UID, _ time.Time) bool { return !slices.Contains(left, uid) })
	if len(k.at[controlPlane]) == 0 {
		delete(k.at, controlPlane)
	}
}

// of returns the times of the objects of a control plane; mu is held.
func (k *sightings) of(controlPlane client.ObjectKey) map[types.UID]time.Time {
	if k.at == nil {
		k.at = map[client.ObjectKey]map[types.UID]time.Time{}
	}
	if k.at[controlPlane] == nil {
		k.at[controlPlane] = map[types.UID]time.Time{}
	}
	return k.at[controlPlane]
}
