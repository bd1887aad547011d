package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/test/plane"
)

// subject is the measured cluster.
type subject struct {
	management, workload client.Client
	name                 string
	policy               infrav1.InPlacePolicy
	// containers are the ids before the upgrade.
	containers map[string]bool
}

func newSubject(management client.Client, workload []byte, name string, policy infrav1.InPlacePolicy) (*subject, error) {
	config, err := clientcmd.RESTConfigFromKubeConfig(workload)
	if err != nil {
		return nil, err
	}
	config.Timeout = 10 * time.Second // Its API servers restart.
	c, err := plane.NewClient(config)
	return &subject{management: management, workload: c, name: name, policy: policy}, err
}

// until repeats a check until it succeeds. Errors of an API server that restarts are no end.
func until(ctx context.Context, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// startPods starts pods on the workers and records their containers.
func (s *subject) startPods(ctx context.Context, n int) error {
	labels := map[string]string{"app": "pause"}
	pods := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "pause"}, Spec: appsv1.DeploymentSpec{
		Replicas: ptr.To(int32(n)), Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{
			Containers: []corev1.Container{{Name: "pause", Image: "registry.capstan.dev/pause:v1", ImagePullPolicy: corev1.PullNever}},
		}},
	}}
	if err := s.workload.Create(ctx, pods); err != nil {
		return err
	}
	return until(ctx, func(ctx context.Context) (err error) {
		if s.containers, err = s.running(ctx); err == nil && len(s.containers) != n {
			err = fmt.Errorf("%d of %d containers run", len(s.containers), n)
		}
		return err
	})
}

// running returns the ids of the running containers that have never restarted.
func (s *subject) running(ctx context.Context) (map[string]bool, error) {
	list, out := &corev1.PodList{}, map[string]bool{}
	if err := s.workload.List(ctx, list, client.InNamespace(metav1.NamespaceDefault)); err != nil {
		return nil, err
	}
	for _, pod := range list.Items {
		for _, c := range pod.Status.ContainerStatuses {
			if c.State.Running != nil && c.RestartCount == 0 {
				out[c.ContainerID] = true
			}
		}
	}
	return out, nil
}

// lostContainers returns how many containers of the beginning do not run any more.
func (s *subject) lostContainers(ctx context.Context) (lost int, err error) {
	err = until(ctx, func(ctx context.Context) error {
		now, err := s.running(ctx)
		lost = 0
		for id := range s.containers {
			if !now[id] {
				lost++
			}
		}
		return err
	})
	return lost, err
}

func (s *subject) upgradeControlPlane(ctx context.Context) error {
	cp := &controlplanev1.CapstanControlPlane{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: s.name + "-control-plane"}}
	if err := s.management.Get(ctx, client.ObjectKeyFromObject(cp), cp); err != nil {
		return err
	}
	before := cp.DeepCopy()
	cp.Spec.Version, cp.Spec.Rollout.Strategy.InPlace = version, controlplanev1.InPlacePolicy(s.policy)
	if err := s.management.Patch(ctx, cp, client.MergeFrom(before)); err != nil {
		return err
	}
	n := ptr.Deref(cp.Spec.Replicas, 1)
	return until(ctx, func(ctx context.Context) error {
		if err := s.management.Get(ctx, client.ObjectKeyFromObject(cp), cp); err != nil {
			return err
		}
		st := cp.Status
		if st.ObservedGeneration < cp.Generation || ptr.Deref(st.Replicas, 0) != n || ptr.Deref(st.ReadyReplicas, 0) != n || ptr.Deref(st.UpToDateReplicas, 0) != n ||
			len(st.Versions) != 1 || st.Versions[0].Version != version {
			return fmt.Errorf("want %d Machines ready and up to date, have %d, %d and %d with versions %v", n,
				ptr.Deref(st.Replicas, 0), ptr.Deref(st.ReadyReplicas, 0), ptr.Deref(st.UpToDateReplicas, 0), st.Versions)
		}
		return nil
	})
}

// upgradeWorkers updates one worker after the other in place. A replacement creates a new one first, the default of Cluster API.
func (s *subject) upgradeWorkers(ctx context.Context) error {
	md := &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: s.name + "-md-0"}}
	if err := s.management.Get(ctx, client.ObjectKeyFromObject(md), md); err != nil {
		return err
	}
	before := md.DeepCopy()
	md.Spec.Template.Spec.Version = version
	metav1.SetMetaDataAnnotation(&md.ObjectMeta, infrav1.InPlaceAnnotation, string(s.policy))
	if s.policy != infrav1.InPlaceNever {
		md.Spec.Rollout.Strategy.Type = clusterv1.RollingUpdateMachineDeploymentStrategyType
		md.Spec.Rollout.Strategy.RollingUpdate = clusterv1.MachineDeploymentRolloutStrategyRollingUpdate{MaxSurge: ptr.To(intstr.FromInt32(0)), MaxUnavailable: ptr.To(intstr.FromInt32(1))}
	}
	if err := s.management.Patch(ctx, md, client.MergeFrom(before)); err != nil {
		return err
	}
	n := int(ptr.Deref(md.Spec.Replicas, 1))
	return until(ctx, func(ctx context.Context) error {
		// The status of the MachineDeployment counts the former Machines for a moment after the change.
		machines := &clusterv1.MachineList{}
		if err := s.management.List(ctx, machines, client.InNamespace(md.Namespace), client.MatchingLabels{clusterv1.MachineDeploymentNameLabel: md.Name}); err != nil {
			return err
		}
		current := 0
		for i := range machines.Items {
			m := &machines.Items[i]
			if m.Status.NodeInfo != nil && m.Status.NodeInfo.KubeletVersion == version && conditions.IsTrue(m, clusterv1.MachineAvailableCondition) && conditions.IsTrue(m, clusterv1.MachineUpToDateCondition) {
				current++
			}
		}
		if current != n || len(machines.Items) != n {
			return fmt.Errorf("want %d Machines available with %s, have %d of %d", n, version, current, len(machines.Items))
		}
		return nil
	})
}
