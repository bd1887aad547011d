package controlplane

import (
	"context"
	"errors"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/klog/v2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/external"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/labels/format"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/naming"
	"capstan.dev/capstan/internal/reconciling"
)

// machines is the step that creates, deletes and updates Machines.
type machines struct {
	*clients
	*machineReader
	*machineWriter
	*annotator
	*applier
	*recorder
	strictContract bool
	updates        *updates
	// trials are the Machines that could not be created.
	trials trials
}

// reconcile does the next step towards the Machines of the spec, and reports the reason when it cannot.
func (r *machines) reconcile(ctx context.Context, s *scope) (result, error) {
	out, err := r.act(ctx, s)
	if err != nil && !apierrors.IsConflict(err) {
		out.blocked = advise(err)
	}
	err = out.afterRefusal(ctx, err)
	return out, err
}

// isRefused reports whether the API server, or an admission webhook, has refused a change.
func isRefused(err error) bool {
	return apierrors.IsInvalid(err) || apierrors.IsForbidden(err) || apierrors.IsBadRequest(err)
}

// advise adds a remedy to an error that a user can solve.
func advise(err error) string {
	if isRefused(err) {
		return err.Error() + " (change the spec, or the quota, webhook or feature gate that refuses it)"
	}
	return err.Error()
}

// act creates the missing Machines, deletes one, or takes the next step of an update in place.
func (r *machines) act(ctx context.Context, s *scope) (result, error) {
	if p := model.PlanMachines(s.Fleet(), s.Target()); !p.Acts() {
		return result{blocked: p.Why, requeueAfter: r.updates.again(s)}, r.updates.releaseStopped(ctx, s)
	}
	// The cache may be outdated and the next steps are irreversible, so the decision is repeated on live objects.
	if current, err := r.readLive(ctx, s); err != nil || !current {
		return result{}, err
	}
	p := model.PlanMachines(s.Fleet(), s.Target())
	switch {
	case p.Create > 0:
		return r.createMachines(ctx, s, p)
	case p.Remove != nil:
		why := "ScaleDown"
		if len(s.Outdated[p.Remove.Name]) > 0 {
			why = "RollOut"
		}
		return result{}, r.deleteMachine(ctx, s, p.Remove, why)
	case p.Update != nil:
		return r.updates.advance(ctx, s, p.Update)
	}
	return blocked(p.Why), nil
}

// endUpdate does what follows the end of an update in place. It creates and removes no Machine.
func (r *machines) endUpdate(ctx context.Context, s *scope) (result, error) {
	if s.Fleet().Updated() == nil {
		return result{}, r.updates.releaseStopped(ctx, s)
	}
	if current, err := r.readLive(ctx, s); err != nil || !current {
		return result{}, err
	}
	if i := s.Fleet().Updated(); i != nil {
		out, err := r.updates.advance(ctx, s, i)
		err = out.afterRefusal(ctx, err)
		return out, err
	}
	return result{}, nil
}

// createMachines creates Machines. All but the first one of a cluster may be created at once.
func (r *machines) createMachines(ctx context.Context, s *scope, p model.Plan) (out result, err error) {
	role := bootstrapv1.RoleControlPlane
	if p.First {
		role = bootstrapv1.RoleInit
	}
	for range p.Create {
		created, err := r.createMachine(ctx, s, role)
		if out.merge(created); err != nil {
			return out, err
		}
	}
	return out, nil
}

// createMachine creates a Machine, unless a recent attempt failed.
func (r *machines) createMachine(ctx context.Context, s *scope, role bootstrapv1.Role) (result, error) {
	if !s.DomainsKnown() {
		return blocked("the infrastructure does not show failure domains yet, and is not provisioned"), nil // A change of the infrastructure's object is an event.
	}
	last := r.trials.get(s.Object)
	if left := last.after.Sub(s.Now); left > 0 {
		return result{blocked: last.why, requeueAfter: left}, nil
	}
	tried, err := r.tryMachine(ctx, s, role, last.name)
	last.name = tried.name
	missing := missingTemplateError("")
	switch {
	case errors.As(err, &missing):
		return blocked(err.Error()), nil // Its creation is an event.
	case err == nil:
		r.trials.forget(client.ObjectKeyFromObject(s.Object))
		return result{}, r.afterCreation(ctx, s, tried)
	case !apierrors.IsConflict(err):
		last = last.failed(advise(err), s.Now)
		r.trials.set(s.Object, last)
		return requeueAfter(last.after.Sub(s.Now)), err
	}
	return result{}, err
}

// attempt is the result of an attempt to create a Machine.
type attempt struct {
	// name of the Machine for the next attempt.
	name string
	// machine was created, with the other objects.
	machine *clusterv1.Machine
	parts   []client.Object
}

// tryMachine creates a Machine with its CapstanConfig and its infrastructure machine. The CapstanConfig is created first and
// the Machine last. After a crash in between, the config without a Machine is found, and the other objects are created under
// its name, so that none is left over or created twice. name is that of a failed attempt, or empty.
func (r *machines) tryMachine(ctx context.Context, s *scope, role bootstrapv1.Role, name string) (attempt, error) {
	out := attempt{name: name}
	infraTemplate, err := r.infrastructure.template(ctx, s)
	if err != nil {
		return out, err
	}
	plan, err := r.planConfig(ctx, s, role, name)
	if plan.Use == nil {
		out.name = plan.Name
	}
	if err != nil {
		return out, err
	}
	config, err := r.makeConfig(ctx, s, role, plan)
	if err != nil {
		return out, err
	}
	infraMachine, err := desiredInfraMachine(s, infraTemplate, config.Name)
	if err != nil {
		return out, err
	}
	if err := r.createInfraMachine(ctx, s, infraMachine); err != nil {
		return out, fmt.Errorf("cannot make the %s %s: %w", infraMachine.GetKind(), config.Name, err)
	}
	machine := desiredMachine(s, r.freshMachine(s, infraMachine))
	if err := r.apply(ctx, machine); err != nil {
		return out, fmt.Errorf("cannot make the Machine %s: %w", machine.Name, err)
	}
	s.Machines.Insert(machine)
	out.machine, out.parts = machine, []client.Object{config, infraMachine}
	return out, nil
}

// afterCreation does the rest for a Machine that exists. Its errors are no failed creations: the next attempt is for another
// Machine. Core hands the objects over if this fails, and forgetReplaced ends the remediation.
func (r *machines) afterCreation(ctx context.Context, s *scope, made attempt) error {
	machine := made.machine
	created.WithLabelValues(s.Object.Namespace, s.Object.Name).Inc()
	r.event(s, corev1.EventTypeNormal, "Created", "Create", "Created Machine %s", machine.Name)
	ctrl.LoggerFrom(ctx).Info("Created Machine", "Machine", klog.KObj(machine), "failureDomain", machine.Spec.FailureDomain)
	return errors.Join(r.remember(machine, desiredMachine(s, machine)), r.handOver(ctx, machine, made.parts...), r.finishRemediation(ctx, s))
}

// createInfraMachine creates an infrastructure machine, or finds the existing one of a refused Machine. One that was made from another template
// and has no Machine is deleted: the next attempt creates it from the present one.
func (r *machines) createInfraMachine(ctx context.Context, s *scope, infraMachine *unstructured.Unstructured) error {
	err := r.Client.Create(ctx, infraMachine)
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	if err := r.Client.Get(ctx, client.ObjectKeyFromObject(infraMachine), infraMachine); err != nil {
		return err
	}
	free := metav1.GetControllerOfNoCopy(infraMachine) == nil
	former := free && !model.ClonedFrom(infraMachine, s.Object.Spec.MachineTemplate.Spec.InfrastructureRef)
	if former && infraMachine.GetDeletionTimestamp() == nil {
		if err := r.deleteAsRead(ctx, infraMachine); err != nil {
			return err
		}
	}
	if former || infraMachine.GetDeletionTimestamp() != nil {
		return errors.New("the previous one is still being deleted")
	}
	return nil
}

// planConfig chooses the CapstanConfig of the next Machine. It reserves the name of the first one, and changes nothing else. name is that of
// a failed attempt, or empty. The plan of an error has the name for the next attempt.
func (r *machines) planConfig(ctx context.Context, s *scope, role bootstrapv1.Role, name string) (model.ConfigPlan, error) {
	unfinished, err := r.unfinishedConfigs(ctx, s)
	if err != nil {
		return model.ConfigPlan{Name: name}, err
	}
	if s.Machines[name] != nil { // The attempt has created the Machine.
		name = ""
	}
	wanted := desiredConfig(s, name, role).Spec
	plan := model.ChooseConfig(unfinished, wanted, name, false)
	if plan.Name == "" {
		if plan.Name, err = machineName(s); err != nil {
			return plan, err
		}
	}
	if role != bootstrapv1.RoleInit {
		return plan, nil
	}
	reserved, err := r.reserveFirst(ctx, s, plan.Name)
	if err != nil {
		return plan, err
	}
	if err := r.checkName(ctx, s, reserved); err != nil {
		return plan, err // The next attempt must not insist on this name: the user can remove its reservation.
	}
	return model.ChooseConfig(unfinished, wanted, reserved, true), nil
}

// makeConfig removes the CapstanConfigs that no Machine gets, and returns that of the next Machine.
func (r *machines) makeConfig(ctx context.Context, s *scope, role bootstrapv1.Role, plan model.ConfigPlan) (*bootstrapv1.CapstanConfig, error) {
	for _, config := range plan.Remove {
		if err := r.removeUnfinished(ctx, s, config); err != nil {
			return nil, err
		}
	}
	if plan.Use != nil {
		return plan.Use, nil
	}
	if err := r.checkData(ctx, s, plan.Name); err != nil {
		return nil, err
	}
	config := desiredConfig(s, plan.Name, role)
	if err := r.Client.Create(ctx, config); err != nil {
		return nil, fmt.Errorf("cannot make the CapstanConfig %s: %w", config.Name, err)
	}
	return config, nil
}

// unfinishedConfigs returns the CapstanConfigs whose Machines do not exist.
func (r *machines) unfinishedConfigs(ctx context.Context, s *scope) ([]*bootstrapv1.CapstanConfig, error) {
	list := &bootstrapv1.CapstanConfigList{}
	if err := r.LiveClient.List(ctx, list, reconciling.ControlPlaneOf(client.ObjectKeyFromObject(s.Cluster))); err != nil {
		return nil, err
	}
	var out []*bootstrapv1.CapstanConfig
	for i := range list.Items {
		config := &list.Items[i]
		ours := util.IsOwnedByObject(config, s.Object, controlplanev1.ControlPlaneGroupKind) || len(config.OwnerReferences) == 0 && model.IsReferenced(s.Object, s.Cluster)
		if ours && s.Machines[config.Name] == nil && config.DeletionTimestamp.IsZero() {
			out = append(out, config)
		}
	}
	return out, nil
}

// removeUnfinished deletes a CapstanConfig without a Machine, and its infrastructure machine. If the Machine was created
// meanwhile, both have changed and are kept.
func (r *machines) removeUnfinished(ctx context.Context, s *scope, config *bootstrapv1.CapstanConfig) error {
	infraTemplate, err := r.infrastructure.template(ctx, s)
	if err != nil {
		return err
	}
	infraMachine, err := desiredInfraMachine(s, infraTemplate, config.Name)
	if err != nil {
		return err
	}
	switch err := r.Client.Get(ctx, client.ObjectKeyFromObject(infraMachine), infraMachine); {
	case apierrors.IsNotFound(err):
	case err != nil:
		return err
	default:
		if err := r.deleteAsRead(ctx, infraMachine); err != nil {
			return err
		}
	}
	return r.deleteAsRead(ctx, config)
}

// deleteAsRead deletes an object without a Machine, if it has not changed since it was read.
func (r *machines) deleteAsRead(ctx context.Context, obj client.Object) error {
	if metav1.GetControllerOfNoCopy(obj) != nil {
		return nil // A Machine has it.
	}
	uid, version := obj.GetUID(), obj.GetResourceVersion()
	return client.IgnoreNotFound(r.Client.Delete(ctx, obj, client.Preconditions{UID: &uid, ResourceVersion: &version}))
}

// ownLabels identify the owner of a Machine, a config or an infrastructure machine (CP-19), and its manager, which is that of
// the control plane (CP-22).
func ownLabels(s *scope) map[string]string {
	out := map[string]string{
		clusterv1.ClusterNameLabel:             s.Cluster.Name,
		clusterv1.MachineControlPlaneLabel:     "",
		clusterv1.MachineControlPlaneNameLabel: format.MustFormatValue(s.Object.Name),
	}
	reconciling.CopyWatchLabel(out, s.Object)
	return out
}

// metadata of a new object. Labels and annotations of the template are applied afterwards, so that they can be removed again;
// see propagate.go.
func metadata(s *scope, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: s.Cluster.Namespace, Name: name, Labels: ownLabels(s)}
}

// ownerRef owns the CapstanConfig and the infrastructure machine until the Machine's controller owns them.
func ownerRef(s *scope) metav1.OwnerReference {
	ref := controllerRef(s.Object)
	ref.Controller, ref.BlockOwnerDeletion = nil, nil
	return ref
}

// desiredConfig returns the CapstanConfig of a new Machine. The first Machine has RoleInit, and may begin with a backup.
func desiredConfig(s *scope, name string, role bootstrapv1.Role) *bootstrapv1.CapstanConfig {
	out := &bootstrapv1.CapstanConfig{ObjectMeta: metadata(s, name), Spec: *s.Object.Spec.Config.DeepCopy()}
	out.OwnerReferences = []metav1.OwnerReference{ownerRef(s)}
	out.Spec.Role = role
	if role == bootstrapv1.RoleInit && s.RestoreSource != nil {
		out.Spec.Restore = *s.RestoreSource
	}
	return out
}

func desiredInfraMachine(s *scope, from *unstructured.Unstructured, name string) (*unstructured.Unstructured, error) {
	ref := ownerRef(s)
	meta := metadata(s, name)
	return external.GenerateTemplate(&external.GenerateTemplateInput{
		Template:    from.DeepCopy(),
		TemplateRef: &corev1.ObjectReference{APIVersion: from.GetAPIVersion(), Kind: from.GetKind(), Name: from.GetName(), Namespace: from.GetNamespace()},
		Namespace:   meta.Namespace,
		Name:        name,
		ClusterName: s.Cluster.Name,
		OwnerRef:    &ref,
		Labels:      meta.Labels,
	})
}

// newMachine returns the fields of a Machine that never change.
func newMachine(s *scope, infraMachine *unstructured.Unstructured) *clusterv1.Machine {
	out := &clusterv1.Machine{
		ObjectMeta: metadata(s, infraMachine.GetName()),
		Spec: clusterv1.MachineSpec{
			ClusterName:   s.Cluster.Name,
			Version:       model.WantedVersion(s.Object),
			FailureDomain: domainOf(s, infraMachine),
			Bootstrap: clusterv1.Bootstrap{ConfigRef: clusterv1.ContractVersionedObjectReference{
				APIGroup: bootstrapv1.GroupVersion.Group, Kind: bootstrapv1.ConfigKind, Name: infraMachine.GetName(),
			}},
			InfrastructureRef: clusterv1.ContractVersionedObjectReference{
				APIGroup: infraMachine.GroupVersionKind().Group, Kind: infraMachine.GetKind(), Name: infraMachine.GetName(),
			},
		},
	}
	if open := s.OpenRemediation(); open != nil {
		repaired := *open
		repaired.Open = nil // Another Machine replaces that one.
		out.Annotations = map[string]string{controlplanev1.RemediationForAnnotation: repaired.String()}
	}
	if id := s.RestoredAs(); id != "" {
		metav1.SetMetaDataAnnotation(&out.ObjectMeta, controlplanev1.RestoreAnnotation, id)
	}
	return out
}

// domainOf returns the failure domain of a new Machine. It is empty if the infrastructure machine limits its hosts: the infrastructure
// provider then spreads the Machines.
func domainOf(s *scope, infraMachine *unstructured.Unstructured) string {
	if m := capstanMachine(infraMachine); m != nil && model.LimitsHosts(m.Spec) {
		return ""
	}
	return model.PlaceMachine(model.ForControlPlanes(s.FailureDomains()), s.Machines.UnsortedList(), s.Outdated)
}

// machineName renders spec.machineNaming.template.
func machineName(s *scope) (string, error) {
	return renderName(s.Object.Spec.MachineNaming.Template, s.Cluster.Name, s.Object.Name, rand.String(5))
}

// The fields of spec.machineNaming.template.
const (
	clusterField      = ".cluster.name"
	controlPlaneField = ".capstanControlPlane.name"
	randomField       = ".random"
)

func parseNaming(text string) (naming.Template, error) {
	return naming.Parse(text, clusterField, controlPlaneField, randomField)
}

func renderName(text, cluster, controlPlane, random string) (string, error) {
	if text == "" {
		text = controlplanev1.DefaultMachineNamingTemplate
	}
	template, err := parseNaming(text)
	if err != nil {
		return "", fmt.Errorf("spec.machineNaming.template cannot be read: %w", err)
	}
	name := template.Render(map[string]string{clusterField: cluster, controlPlaneField: controlPlane, randomField: random})
	if len(name) > 63 {
		name = name[:58] + random
	}
	if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 {
		return "", fmt.Errorf("spec.machineNaming.template gives %q, which is no name: %s", name, strings.Join(problems, "; "))
	}
	return name, nil
}
