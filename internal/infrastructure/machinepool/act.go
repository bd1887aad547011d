package machinepool

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/storage/names"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capicontroller "sigs.k8s.io/cluster-api/util/controller"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// parallel is the number of concurrent writes of one pool.
const parallel = 32

// forEach calls f for each item, several at a time, and returns all errors.
func forEach[T any](items []T, f func(T) error) error {
	errs := make(chan error, len(items))
	slots := make(chan struct{}, parallel)
	for _, item := range items {
		slots <- struct{}{}
		go func() {
			defer func() { <-slots }()
			errs <- f(item)
		}()
	}
	var all []error
	for range items {
		all = append(all, <-errs)
	}
	return errors.Join(all...)
}

// createMembers makes one CapstanMachine for each failure domain of the list (MP-02). It does not wait until machines
// run. After an interruption the next plan finds the created machines by their labels, and contains the rest.
func (r *Reconciler) createMembers(ctx context.Context, s *scope, domains []string) error {
	if len(domains) == 0 {
		return nil
	}
	var created atomic.Int32
	err := forEach(domains, func(domain string) error {
		m := newMachine(s, domain)
		if err := r.Client.Create(ctx, m); err != nil {
			return err
		}
		created.Add(1)
		ctrl.LoggerFrom(ctx).Info("Created a machine", "CapstanMachine", klog.KObj(m), "failureDomain", domain, "version", s.want.version)
		r.WaitForCache(r.controller, s.pool, capicontroller.StructuredObject(infrav1.GroupVersion, infrav1.MachineKind), m.ResourceVersion)
		return nil
	})
	if n := created.Load(); n > 0 {
		r.event(s, "MachinesCreated", "Create", "Created %d machines with Kubernetes %s", n, s.want.version)
	}
	return err
}

// poolReference is the reference of a machine to its pool. The pool is an owner but not the controller: core
// makes the Machine that.
func poolReference(pool *infrav1.CapstanMachinePool) metav1.OwnerReference {
	return metav1.OwnerReference{
		APIVersion: infrav1.GroupVersion.String(), Kind: poolGVK.Kind, Name: pool.Name, UID: pool.UID,
		BlockOwnerDeletion: ptr.To(true),
	}
}

// newMachine is a machine of the pool as core expects it.
func newMachine(s *scope, domain string) *infrav1.CapstanMachine {
	meta := templateMetadata(s)
	m := &infrav1.CapstanMachine{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:       s.pool.Namespace,
			Name:            names.SimpleNameGenerator.GenerateName(namePrefix(s.pool.Name)),
			Labels:          meta.labels,
			Annotations:     meta.annotations,
			OwnerReferences: []metav1.OwnerReference{poolReference(s.pool)},
			// Before the first side effect, and with the object itself: one write less.
			Finalizers: []string{infrav1.MachineFinalizer},
		},
		Spec: *s.pool.Spec.MachineTemplate.Spec.DeepCopy(),
	}
	for key, value := range s.want.annotations() {
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, key, value)
	}
	if domain != "" {
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, infrav1.MachineFailureDomainAnnotation, domain)
	}
	return m
}

// maxNamePrefix leaves room for a dash and five letters in a host name, which a machine's name becomes.
const maxNamePrefix = 63 - 6

// namePrefix is the start of the names of a pool's machines. A dash cannot follow a dot.
func namePrefix(pool string) string {
	return strings.TrimRight(pool[:min(len(pool), maxNamePrefix)], ".-") + "-"
}

// deleteMembers deletes machines through their owner Machines, so that core drains their Nodes first. A machine
// that core has made no Machine for has nothing on any host: it waits for its Machine. why is part of the event.
func (r *Reconciler) deleteMembers(ctx context.Context, s *scope, remove []string, why string) error {
	if len(remove) == 0 {
		return nil
	}
	ctrl.LoggerFrom(ctx).Info("Deleting machines", "CapstanMachines", remove, "why", why)
	byName := map[string]member{}
	for _, m := range s.members {
		byName[m.capstan.Name] = m
	}
	r.event(s, "MachinesDeleted", "Delete", "Deleting %d machines: %s", len(remove), why)
	return forEach(remove, func(name string) error { return r.deleteMember(ctx, byName[name]) })
}

func (r *Reconciler) deleteMember(ctx context.Context, m member) error {
	if m.machine != nil {
		return r.delete(ctx, m.machine)
	}
	return r.delete(ctx, m.capstan)
}

func (r *Reconciler) deleteMachines(ctx context.Context, machines []clusterv1.Machine) error {
	return forEach(machines, func(m clusterv1.Machine) error { return r.delete(ctx, &m) })
}

// delete deletes the very object that was decided on, and not one that came back under its name.
func (r *Reconciler) delete(ctx context.Context, obj client.Object) error {
	err := r.Client.Delete(ctx, obj, client.Preconditions{UID: ptr.To(obj.GetUID())})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}
