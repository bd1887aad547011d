// Package endpoint elects the control plane machine whose host has the virtual address of the cluster's endpoint.
//
// The machines compete for a Lease in their own cluster, so the election needs no management plane, and no machine wins
// without a majority of etcd. A holder counts its term from the moment before it writes the Lease. Others count the term
// from the moment after they have read it. Both use a monotonic clock, so the term of a holder has ended before another machine
// can write the Lease. capstand gives its host the address until the end of the term (package machineapi).
//
// Layer: node. Allowed imports: api, library, contract.
package endpoint

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"

	"capstan.dev/capstan/internal/boottime"
	"capstan.dev/capstan/internal/machineapi"
)

const (
	// leaseName in the namespace kube-system.
	leaseName = "capstan-endpoint"
	// pause between two steps.
	pause = 500 * time.Millisecond
	// margin is the part of the Lease that a holder does not use: for the removal of the address.
	margin = 500 * time.Millisecond
	// callTimeout bounds a request. An API server without etcd's majority does not answer.
	callTimeout = time.Second
)

// Elector takes part in the election while capstand offers the host.
type Elector struct {
	// Name identifies the machine.
	Name string
	// Dir is the folder that the machine shares with capstand.
	Dir string
	// Leases of the namespace.
	Leases dynamic.ResourceInterface
	Log    *slog.Logger

	// now is the clock; boottime.Now outside of tests.
	now func() time.Duration
	// own is the Lease as this machine last wrote it, if nothing else is known.
	own *unstructured.Unstructured
	// seen is the resource version of the Lease of another machine, since the time at which it was read first.
	seen  string
	since time.Duration
	// until is the end of the own term.
	until time.Duration
}

// Run takes part until ctx ends. It polls: a watch would not show that a holder is silent.
func (e *Elector) Run(ctx context.Context) {
	if e.now == nil {
		e.now = boottime.Now
	}
	ticker := time.NewTicker(pause)
	defer ticker.Stop()
	for ctx.Err() == nil {
		if e.offered() {
			e.step(ctx)
		}
		select {
		case <-ctx.Done():
		case <-ticker.C:
		}
	}
}

// offered returns whether the host can have the address.
func (e *Elector) offered() bool {
	var offer machineapi.EndpointTerm
	data, err := os.ReadFile(filepath.Join(e.Dir, machineapi.EndpointOfferFile))
	return err == nil && json.Unmarshal(data, &offer) == nil && offer.Until > e.now()
}

// step renews the Lease, or takes it if its holder is silent, and reports the term to capstand.
func (e *Elector) step(ctx context.Context) {
	// Renewals every second leave room for two that fail.
	if held := e.until - e.now(); held > machineapi.EndpointLease-margin-2*pause+pause/2 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	started, err := e.write(ctx)
	if err != nil {
		e.own = nil
		if !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) {
			e.Log.Warn("Cannot renew the Lease of the endpoint", "error", err)
		}
		return
	}
	if started == 0 {
		return
	}
	if e.until < started {
		e.Log.Info("This machine holds the Lease of the endpoint")
	}
	e.until = started + machineapi.EndpointLease - margin
	if err := e.report(); err != nil {
		e.Log.Error("Cannot report the Lease of the endpoint", "error", err)
	}
}

// write writes the Lease if this machine may have it, and returns the time before the request; 0 if another machine holds it.
func (e *Elector) write(ctx context.Context) (started time.Duration, err error) {
	lease := e.own
	if lease == nil {
		lease, err = e.Leases.Get(ctx, leaseName, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			started = e.now()
			e.own, err = e.Leases.Create(ctx, e.lease(""), metav1.CreateOptions{})
			return started, err
		}
		if err != nil {
			return 0, err
		}
	}
	if holder, _, _ := unstructured.NestedString(lease.Object, "spec", "holderIdentity"); !e.mayTake(holder, lease.GetResourceVersion()) {
		return 0, nil
	}
	started = e.now()
	e.own, err = e.Leases.Update(ctx, e.lease(lease.GetResourceVersion()), metav1.UpdateOptions{})
	return started, err
}

// mayTake returns whether this machine may write a Lease of a holder, which it has just read: its own, and one that has not
// changed for the whole term.
func (e *Elector) mayTake(holder, version string) bool {
	if holder == e.Name || holder == "" {
		return true
	}
	if version != e.seen {
		e.seen, e.since = version, e.now()
	}
	return e.now()-e.since >= machineapi.EndpointLease
}

func (e *Elector) lease(version string) *unstructured.Unstructured {
	metadata := map[string]any{"name": leaseName, "namespace": metav1.NamespaceSystem}
	if version != "" {
		metadata["resourceVersion"] = version
	}
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata,
		"spec": map[string]any{
			"holderIdentity": e.Name, "leaseDurationSeconds": int64(machineapi.EndpointLease / time.Second),
			"renewTime": time.Now().UTC().Format(metav1.RFC3339Micro),
		},
	}}
}

// report replaces the file for capstand. The folder is on a disk of the host, and the content is worthless after a crash, so
// the file is not synchronized.
func (e *Elector) report() error {
	data, err := json.Marshal(machineapi.EndpointTerm{Until: e.until})
	if err != nil {
		return err
	}
	path := filepath.Join(e.Dir, machineapi.EndpointLeaseFile)
	if err := os.WriteFile(path+".new", data, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
