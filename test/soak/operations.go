//go:build e2e

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
	"capstan.dev/capstan/internal/manifest"
)

const (
	namespace = "soak"
	poolName  = "soak"
	poolCIDR  = "198.18.77.0/24"
)

// act returns the function of an operation. The caller repeats it until it succeeds, because the API server may not
// respond. A repetition after a success changes nothing.
func (s *soak) act(op operation, number int) func(context.Context) error {
	name := client.ObjectKey{Namespace: namespace, Name: op.Cluster}
	switch op.Kind {
	case createCluster:
		return func(ctx context.Context) error { return s.createCluster(ctx, op) }
	case deleteCluster:
		return func(ctx context.Context) error {
			return s.deleteAll(ctx, &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}})
		}
	case scaleControlPlane:
		return s.patch(&controlplanev1.CapstanControlPlane{}, op.Cluster+"-control-plane", fmt.Sprintf(`{"spec":{"replicas":%d}}`, op.Count))
	case rolloutControl:
		return s.patch(&controlplanev1.CapstanControlPlane{}, op.Cluster+"-control-plane", rolloutNow())
	case scaleWorkers:
		return s.patchWorkers(op, fmt.Sprintf(`{"spec":{"replicas":%d}}`, op.Count))
	case rolloutWorkers:
		if s.wants(op.Cluster).Pool {
			return s.patch(&bootstrapv1.CapstanConfig{}, op.Cluster+"-mp-0", fmt.Sprintf(`{"spec":{"files":[{"path":"/etc/motd","content":"step %d"}]}}`, number))
		}
		return s.patch(&clusterv1.MachineDeployment{}, op.Cluster+"-md-0", rolloutNow())
	case deleteMachineOfSet:
		return s.deleteMachine(op)
	case createClaims:
		return func(ctx context.Context) error { return s.createAll(ctx, claimObjects(op)...) }
	case deleteClaims:
		return func(ctx context.Context) error { return s.deleteAll(ctx, claimObjects(op)...) }
	}
	return func(context.Context) error { return fmt.Errorf("unknown operation %q", op.Kind) }
}

// rolloutNow replaces the machines that are older than the current time.
func rolloutNow() string {
	return fmt.Sprintf(`{"spec":{"rollout":{"after":%q}}}`, time.Now().UTC().Format(time.RFC3339))
}

func (s *soak) patch(object client.Object, name, json string) func(context.Context) error {
	object.SetNamespace(namespace)
	object.SetName(name)
	return func(ctx context.Context) error {
		return s.plane.Client.Patch(ctx, object, client.RawPatch(types.MergePatchType, []byte(json)))
	}
}

func (s *soak) patchWorkers(op operation, json string) func(context.Context) error {
	if s.wants(op.Cluster).Pool {
		return s.patch(&clusterv1.MachinePool{}, op.Cluster+"-mp-0", json)
	}
	return s.patch(&clusterv1.MachineDeployment{}, op.Cluster+"-md-0", json)
}

// createCluster creates the objects that the CLI would create. It repeats each creation until it succeeds.
func (s *soak) createCluster(ctx context.Context, op operation) error {
	args := []string{"create", "cluster", op.Cluster, "--namespace", namespace, "--workers", fmt.Sprint(op.Count), "--dry-run"}
	if op.Pool {
		args = append(args, "--flavor", "machinepool")
	}
	manifests, err := s.plane.Capstan(ctx, args...)
	if err != nil {
		return err
	}
	parsed, err := manifest.Parse([]byte(manifests))
	if err != nil {
		return err
	}
	var objects []client.Object
	for _, object := range parsed {
		objects = append(objects, object)
	}
	return s.createAll(ctx, objects...)
}

func (s *soak) createAll(ctx context.Context, objects ...client.Object) error {
	for _, object := range objects {
		if err := s.plane.Client.Create(ctx, object); err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
	}
	return nil
}

func (s *soak) deleteAll(ctx context.Context, objects ...client.Object) error {
	for _, object := range objects {
		if err := s.plane.Client.Delete(ctx, object); client.IgnoreNotFound(err) != nil {
			return err
		}
	}
	return nil
}

// deleteMachine deletes one worker. A repetition deletes the same worker.
func (s *soak) deleteMachine(op operation) func(context.Context) error {
	var chosen *clusterv1.Machine
	return func(ctx context.Context) error {
		if chosen == nil {
			machines := &clusterv1.MachineList{}
			if err := s.plane.Client.List(ctx, machines, client.InNamespace(namespace), client.MatchingLabels{clusterv1.ClusterNameLabel: op.Cluster}); err != nil {
				return err
			}
			workers := slices.DeleteFunc(machines.Items, func(m clusterv1.Machine) bool {
				_, ok := m.Labels[clusterv1.MachineControlPlaneLabel]
				return ok || !m.DeletionTimestamp.IsZero()
			})
			if len(workers) == 0 {
				return errors.New("no worker to delete")
			}
			slices.SortFunc(workers, func(a, b clusterv1.Machine) int { return cmp.Compare(a.Name, b.Name) })
			chosen = &workers[op.Pick%len(workers)]
		}
		return s.deleteAll(ctx, chosen)
	}
}

func claimName(n int) string { return fmt.Sprintf("claim-%06d", n) }

func claimObjects(op operation) (out []client.Object) {
	for n := range op.Count {
		out = append(out, &capiipamv1.IPAddressClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: claimName(op.First + n)},
			Spec:       capiipamv1.IPAddressClaimSpec{PoolRef: capiipamv1.IPPoolReference{APIGroup: ipamv1.GroupVersion.Group, Kind: "CapstanIPPool", Name: poolName}},
		})
	}
	return out
}

// prepare creates the namespace and the pool.
func (s *soak) prepare(ctx context.Context) error {
	return s.retry(ctx, "the namespace and the pool", func(ctx context.Context) error {
		return s.createAll(ctx,
			&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}},
			&ipamv1.CapstanIPPool{
				ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: poolName},
				Spec:       ipamv1.CapstanIPPoolSpec{Subnets: []ipamv1.Subnet{{CIDR: poolCIDR}}},
			})
	})
}

// tryTimeout bounds one attempt of an operation or a check, because a stopped API server never responds.
const tryTimeout = 30 * time.Second

func limited(try func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, tryTimeout)
		defer cancel()
		return try(ctx)
	}
}

// retry repeats a function until it succeeds or its time is over.
func (s *soak) retry(ctx context.Context, what string, try func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, s.bound)
	defer cancel()
	for {
		err := try(ctx)
		if err == nil {
			return nil
		}
		pause(ctx, time.Second)
		if ctx.Err() != nil {
			return fmt.Errorf("expected %s within %v, found: %s", what, s.bound, strings.TrimSpace(err.Error()))
		}
	}
}
