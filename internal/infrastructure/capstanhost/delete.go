package capstanhost

import (
	"context"
	"errors"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/reconciling"
)

// reconcileDelete keeps the host until nothing of this management plane is on it.
func (r *Reconciler) reconcileDelete(ctx context.Context, host *infrav1.CapstanHost) error {
	if !hostselection.Abandoned(host) {
		if why, err := r.inUse(ctx, host); why != "" {
			reconciling.SetCondition(host, clusterv1.DeletingCondition, metav1.ConditionTrue, infrav1.HostDeletingInUseReason,
				"%s. If the host is permanently lost, annotate it with %s", why, infrav1.HostAbandonedAnnotation)
			return err
		}
	}
	if err := r.endTokens(ctx, host); err != nil {
		return err
	}
	r.Pool.Disconnect(host.Name)
	ctrl.LoggerFrom(ctx).Info("Disconnected from the deleted host")
	controllerutil.RemoveFinalizer(host, infrav1.HostFinalizer)
	return nil
}

// inUse returns why the host cannot be deleted, without a full stop; "" if it can. An error is one of the reasons: nobody knows then what
// is on the host.
func (r *Reconciler) inUse(ctx context.Context, host *infrav1.CapstanHost) (why string, err error) {
	of := r.residentsOf(ctx, host)
	machines, clusters, err := r.users(ctx, host.Name, of)
	if err != nil {
		return fmt.Sprintf("The objects on the host are unknown: %s. They may belong to another manager: allow this manager to list CapstanMachines and CapstanClusters of all namespaces, and to read Namespaces, as the provider's ClusterRole does", err), err
	}
	if machines+clusters > 0 {
		return fmt.Sprintf("The host has %d CapstanMachines and the load balancers of %d CapstanClusters: delete them first", machines, clusters), nil
	}
	volumes, err := r.volumes(ctx, host.Name, of)
	if err != nil {
		return fmt.Sprintf("The CapstanVolumes on the host are unknown: %s. Allow this manager to list CapstanVolumes of all namespaces, and to read Namespaces, as the provider's ClusterRole does", err), err
	}
	if volumes > 0 {
		return fmt.Sprintf("The host has %d CapstanVolumes, whose data would be lost: delete them first", volumes), nil
	}
	return "", nil
}

// users counts the objects on a host. Several managers may share it (ALL-07), each with a cache of its own namespace.
// Only the API server has the objects of the others and the newest ones.
func (r *Reconciler) users(ctx context.Context, name string, of residents) (machines, clusters int, err error) {
	if r.WatchNamespace == "" {
		machines, clusters, err = count(ctx, r.Client, name, of, client.MatchingFields{MachineHostIndex: name}, client.MatchingFields{ClusterHostIndex: name})
		if err != nil || machines+clusters > 0 {
			return machines, clusters, err
		}
	}
	return count(ctx, r.LiveClient, name, of, client.MatchingFields{}, client.MatchingFields{})
}

// volumes counts the CapstanVolumes on a host, of all namespaces.
func (r *Reconciler) volumes(ctx context.Context, name string, of residents) (int, error) {
	list := &infrav1.CapstanVolumeList{}
	if err := r.LiveClient.List(ctx, list); err != nil {
		return 0, err
	}
	return countIf(list.Items, func(v *infrav1.CapstanVolume) bool { return v.Spec.HostName == name }, of.volume)
}

func count(ctx context.Context, c client.Reader, name string, of residents, ofMachine, ofCluster client.ListOption) (machines, clusters int, err error) {
	machineList, clusterList := &infrav1.CapstanMachineList{}, &infrav1.CapstanClusterList{}
	if err := errors.Join(c.List(ctx, machineList, ofMachine), c.List(ctx, clusterList, ofCluster)); err != nil {
		return 0, 0, err
	}
	machines, errMachines := countIf(machineList.Items, func(m *infrav1.CapstanMachine) bool { return m.Spec.HostName == name }, of.machine)
	clusters, errClusters := countIf(clusterList.Items, func(c *infrav1.CapstanCluster) bool { return slices.Contains(hostselection.BalancerHosts(c), name) }, of.cluster)
	return machines, clusters, errors.Join(errMachines, errClusters)
}

// countIf counts the objects that name a host and count as its own.
func countIf[T any](list []T, names func(*T) bool, counts func(*T) (bool, error)) (n int, err error) {
	for i := range list {
		if !names(&list[i]) {
			continue
		}
		ok, err := counts(&list[i])
		if err != nil {
			return 0, err
		}
		if ok {
			n++
		}
	}
	return n, nil
}
