package controlplane

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/external"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/inplace"
	"capstan.dev/capstan/internal/reconciling"
)

// machineReader reads the Machines of a control plane with the objects that belong to them.
type machineReader struct {
	*clients
	*secrets
	infrastructure *infrastructure
}

// ownMachines returns the Machines of a control plane. s.Ambiguous names those that have the labels and belong to another
// owner.
func (r *machineReader) ownMachines(ctx context.Context, c client.Reader, s *scope) (collections.Machines, error) {
	list := &clusterv1.MachineList{}
	if err := c.List(ctx, list, reconciling.ControlPlaneOf(client.ObjectKeyFromObject(s.Cluster))); err != nil {
		return nil, err
	}
	out, others := collections.Machines{}, []string{}
	for i := range list.Items {
		m := &list.Items[i]
		switch why := model.WhyNotOwned(s.Object, s.Cluster, m); {
		case why == "":
			out.Insert(m)
		case model.IsReferenced(s.Object, s.Cluster):
			others = append(others, why)
		}
	}
	slices.Sort(others)
	s.Ambiguous = strings.Join(others, "; ")
	return out, nil
}

// everyMachine returns all Machines of the cluster from the API server, including those without labels and owners.
func (r *machineReader) everyMachine(ctx context.Context, s *scope) ([]clusterv1.Machine, error) {
	list := &clusterv1.MachineList{}
	if err := r.LiveClient.List(ctx, list, client.InNamespace(s.Cluster.Namespace)); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(list.Items, func(m clusterv1.Machine) bool { return m.Spec.ClusterName != s.Cluster.Name }), nil
}

// readLive replaces objects from the cache by live ones. current is false when the spec or one of the annotations has changed, which is an
// event.
func (r *machineReader) readLive(ctx context.Context, s *scope, annotations ...string) (current bool, err error) {
	live := &controlplanev1.CapstanControlPlane{}
	if err := r.LiveClient.Get(ctx, client.ObjectKeyFromObject(s.Object), live); err != nil {
		return false, client.IgnoreNotFound(err)
	}
	if live.UID != s.Object.UID || live.Generation != s.Object.Generation || !live.DeletionTimestamp.IsZero() {
		return false, nil
	}
	for _, name := range annotations {
		if live.Annotations[name] != s.Object.Annotations[name] {
			return false, nil
		}
	}
	s.Object.Annotations = live.Annotations
	if s.Machines, err = r.ownMachines(ctx, r.LiveClient, s); err != nil || s.Ambiguous != "" {
		return false, err
	}
	if err := r.readCertificates(ctx, s); err != nil {
		return false, err
	}
	return true, r.findOutdated(ctx, s)
}

// findOutdated finds the outdated Machines and the reasons, the updates in place, and the deletion timestamps of
// infrastructure machines. After an error it is not known which Machines are outdated.
func (r *machineReader) findOutdated(ctx context.Context, s *scope) (err error) {
	defer func() {
		if err != nil {
			s.Outdated = nil
		}
	}()
	s.Outdated, s.InfrastructureDeletedAt = map[string][]string{}, map[string]time.Time{}
	s.Changes, s.Updates, s.Volumes = map[string][]inplace.Change{}, map[string]*model.Update{}, map[string]bool{}
	s.OtherEncryption, s.parts = map[string]bool{}, map[string]machineParts{}
	for _, machine := range s.Machines {
		parts, err := r.partsOf(ctx, machine)
		if err != nil {
			return err
		}
		s.parts[machine.Name] = parts
		if err := r.findDifferences(ctx, s, machine, parts); err != nil {
			return err
		}
	}
	return r.findOtherCertificates(ctx, s)
}

// findDifferences compares a Machine and the objects that belong to it with the spec.
func (r *machineReader) findDifferences(ctx context.Context, s *scope, machine *clusterv1.Machine, parts machineParts) error {
	infraMachine := parts.infraMachine
	if infraMachine != nil && infraMachine.GetDeletionTimestamp() != nil {
		s.InfrastructureDeletedAt[machine.Name] = infraMachine.GetDeletionTimestamp().Time
	}
	s.Outdated[machine.Name] = model.Outdated(s.Object, machine, parts.config, infraMachine, s.Now)
	s.OtherEncryption[machine.Name] = model.HasOtherEncryption(s.Object, machine, parts.config)
	compared := model.Parts{Config: parts.config}
	if infraMachine != nil {
		compared.InfraMachine = capstanMachine(infraMachine)
		compared.Foreign = compared.InfraMachine == nil
		if err := r.desiredInfrastructure(ctx, s, infraMachine, &compared); err != nil {
			return err
		}
	}
	if compared.LeavesVolumes() {
		s.Volumes[machine.Name] = true
	}
	return r.findUpdate(ctx, s, machine, compared, infraMachine)
}

// findUpdate finds the differences that an update in place can remove, and the state of the update, if the policy allows updates or one was
// begun.
func (r *machineReader) findUpdate(ctx context.Context, s *scope, machine *clusterv1.Machine, parts model.Parts, infraMachine *unstructured.Unstructured) error {
	policy := s.Object.Spec.Rollout.Strategy.InPlace
	if (policy == "" || policy == controlplanev1.InPlaceNever) && !model.Updates(machine) {
		return nil
	}
	changes := model.Differences(s.Object, machine, parts, s.Now)
	s.Changes[machine.Name] = changes
	if model.Updates(machine) && infraMachine != nil {
		if err := r.infrastructure.machines.start(ctx, infraMachine); err != nil {
			return err
		}
	}
	if u := model.ReadUpdate(s.Object, machine, parts, changes); u != nil {
		s.Updates[machine.Name] = u
		s.Outdated[machine.Name] = append(s.Outdated[machine.Name], u.String())
	}
	return nil
}

// desiredInfrastructure reads the template if the infrastructure machine was not created from it. A missing template is no
// difference: its creation is an event, and the step that needs it reports it.
func (r *machineReader) desiredInfrastructure(ctx context.Context, s *scope, infraMachine *unstructured.Unstructured, parts *model.Parts) error {
	if model.ClonedFrom(infraMachine, s.Object.Spec.MachineTemplate.Spec.InfrastructureRef) {
		return nil
	}
	template, err := r.infrastructure.template(ctx, s)
	missing := missingTemplateError("")
	if errors.As(err, &missing) {
		parts.Foreign = true // Nothing is known about the desired machine.
		return nil
	}
	if err != nil {
		return err
	}
	spec, found, err := unstructured.NestedMap(template.Object, "spec", "template", "spec")
	if template.GroupVersionKind().Group != infrav1.GroupVersion.Group || template.GetKind() != infrav1.MachineTemplateKind || err != nil {
		parts.Foreign = true
		return nil
	}
	parts.Desired = &infrav1.CapstanMachineSpec{}
	if !found {
		return nil
	}
	return runtime.DefaultUnstructuredConverter.FromUnstructured(spec, parts.Desired)
}

// capstanMachine returns an infrastructure machine as a CapstanMachine; nil for a kind of another provider.
func capstanMachine(obj *unstructured.Unstructured) *infrav1.CapstanMachine {
	if obj.GroupVersionKind().Group != infrav1.GroupVersion.Group || obj.GetKind() != infrav1.MachineKind {
		return nil
	}
	out := &infrav1.CapstanMachine{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(obj.Object, out); err != nil {
		return nil
	}
	return out
}

// machineParts are the CapstanConfig and the infrastructure machine of a Machine; nil for one that does not exist.
type machineParts struct {
	config       *bootstrapv1.CapstanConfig
	infraMachine *unstructured.Unstructured
}

// partsOf reads the parts of a Machine. A missing object does not make a Machine outdated.
func (r *machineReader) partsOf(ctx context.Context, machine *clusterv1.Machine) (machineParts, error) {
	out := machineParts{config: &bootstrapv1.CapstanConfig{}}
	key := client.ObjectKey{Namespace: machine.Namespace, Name: machine.Spec.Bootstrap.ConfigRef.Name}
	if err := r.Client.Get(ctx, key, out.config); apierrors.IsNotFound(err) {
		out.config = nil
	} else if err != nil {
		return machineParts{}, err
	}
	infraMachine, err := external.GetObjectFromContractVersionedRef(ctx, r.Client, machine.Spec.InfrastructureRef, machine.Namespace)
	if client.IgnoreNotFound(err) != nil {
		return machineParts{}, err
	}
	out.infraMachine = infraMachine
	return out, nil
}

// findOtherCertificates marks a Machine as outdated if its bootstrap data has not the present authorities of the cluster, or not the
// present certificates of an external etcd. If the data was deleted, the age of the client certificate decides about the latter.
func (r *machineReader) findOtherCertificates(ctx context.Context, s *scope) error {
	state := s.Rotation()
	for _, machine := range s.Machines {
		data, err := r.dataOf(ctx, machine)
		if err != nil {
			return err
		}
		for _, change := range []*inplace.Change{
			state.OtherAuthorities(data.made, model.SplitFingerprints(data.annotations[bootstrapv1.AuthoritiesAnnotation])),
			model.OtherEtcdCertificates(data.annotations[bootstrapv1.EtcdCertificatesAnnotation], s.etcdCertificates(), data.lost && s.etcdClientIsNewer(machine)),
		} {
			if change != nil {
				s.Outdated[machine.Name] = append(s.Outdated[machine.Name], change.Why)
				s.Changes[machine.Name] = append(s.Changes[machine.Name], *change)
			}
		}
	}
	return nil
}
