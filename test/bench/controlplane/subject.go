package main

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
)

// subject is the measured control plane.
type subject struct{ client client.Client }

func (s *subject) controlPlane(ctx context.Context) (*controlplanev1.CapstanControlPlane, error) {
	list := &controlplanev1.CapstanControlPlaneList{}
	if err := s.client.List(ctx, list, client.MatchingLabels{clusterv1.ClusterNameLabel: cluster}); err != nil {
		return nil, err
	}
	if len(list.Items) != 1 {
		return nil, fmt.Errorf("%d control planes", len(list.Items))
	}
	return &list.Items[0], nil
}

func (s *subject) change(ctx context.Context, change func(*controlplanev1.CapstanControlPlane)) error {
	cp, err := s.controlPlane(ctx)
	if err != nil {
		return err
	}
	before := cp.DeepCopy()
	change(cp)
	return s.client.Patch(ctx, cp, client.MergeFrom(before))
}

func (s *subject) scale(ctx context.Context, n int32) error {
	return s.change(ctx, func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Replicas = &n })
}

func (s *subject) upgrade(ctx context.Context, version string) error {
	return s.change(ctx, func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Version = version })
}

// otherTemplate copies the template under another name, so that the machines are replaced.
func (s *subject) otherTemplate(ctx context.Context) error {
	cp, err := s.controlPlane(ctx)
	if err != nil {
		return err
	}
	has := &infrav1.CapstanMachineTemplate{}
	key := client.ObjectKey{Namespace: cp.Namespace, Name: cp.Spec.MachineTemplate.Spec.InfrastructureRef.Name}
	if err := s.client.Get(ctx, key, has); err != nil {
		return err
	}
	other := &infrav1.CapstanMachineTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name + "-other"}, Spec: has.Spec}
	if err := s.client.Create(ctx, other); err != nil {
		return err
	}
	return s.change(ctx, func(cp *controlplanev1.CapstanControlPlane) {
		cp.Spec.MachineTemplate.Spec.InfrastructureRef.Name = other.Name
	})
}

// step measures the time from a change until the control plane is settled again.
func (s *subject) step(ctx context.Context, change func(context.Context) error) (time.Duration, error) {
	start := time.Now()
	if err := change(ctx); err != nil {
		return 0, err
	}
	cp, err := s.controlPlane(ctx)
	if err != nil {
		return 0, err
	}
	err = s.settled(ctx, ptr.Deref(cp.Spec.Replicas, 1), cp)
	return time.Since(start), err
}

// settled waits until n Machines are ready and up to date, no operation is in progress, and the controller has seen the
// change.
func (s *subject) settled(ctx context.Context, n int32, changed *controlplanev1.CapstanControlPlane) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		cp, err := s.controlPlane(ctx)
		if err != nil {
			return err
		}
		st := cp.Status
		seen := changed == nil || st.ObservedGeneration >= changed.Generation
		if seen && ptr.Deref(st.Replicas, 0) == n && ptr.Deref(st.ReadyReplicas, 0) == n && ptr.Deref(st.UpToDateReplicas, 0) == n {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("want %d Machines ready and up to date, got %d, %d and %d", n,
				ptr.Deref(st.Replicas, 0), ptr.Deref(st.ReadyReplicas, 0), ptr.Deref(st.UpToDateReplicas, 0))
		case <-time.After(100 * time.Millisecond):
		}
	}
}
