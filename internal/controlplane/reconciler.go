// Package controlplane reconciles CapstanControlPlanes: it creates the Machines of a control plane with everything they need,
// keeps them as the spec demands, and reports their state.
//
// Reconciler runs a list of steps. Each step is a type of its own, takes the scope of the reconciliation and returns a
// result. Decisions are in the package model. Only the manager imports this package.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package controlplane

import (
	"context"
	"errors"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/certs"
	"sigs.k8s.io/cluster-api/util/secret"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/render"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/reconciling"
)

// Reconciler reconciles CapstanControlPlanes.
type Reconciler struct {
	*clients
	*machineReader
	*recorder
	// Options hold the watch filter (ALL-07).
	Options reconciling.Options

	prober         *prober
	workloads      *workloads
	metricsServers *metricsServers
	manifests      *userManifests
	adoption       *adoption
	authorities    *authorities
	kubeconfigs    *kubeconfigs
	bootstrapData  *bootstrapData
	health         *health
	observation    *observation
	rotations      *rotations
	restores       *restores
	backups        *backups
	propagation    *propagation
	machineStatus  *machineStatus
	departures     *departures
	remediations   *remediations
	machines       *machines
	deletion       *deletion
}

// newReconciler gives each step the objects that it needs. c reads from the cache; events can be nil.
func newReconciler(c client.Client, events events.EventRecorder, opts reconciling.Options) *Reconciler {
	clients, recorder := &clients{Client: c, LiveClient: opts.LiveClient, SecretClient: opts.SecretCachingClient}, &recorder{events}
	secrets, annotator, applier := &secrets{clients}, &annotator{clients}, &applier{clients: clients}
	infrastructure := &infrastructure{clients: clients, strictContract: opts.StrictContract}
	reader, writer := &machineReader{clients, secrets, infrastructure}, &machineWriter{clients, recorder}
	abandonment := &abandonment{clients: clients, recorder: recorder}
	prober, answered := newProber(), &sightings{}
	workloads, stores := &workloads{ClusterCache: opts.ClusterCache}, &stores{secrets}
	machines := &machines{
		clients: clients, machineReader: reader, machineWriter: writer, annotator: annotator, applier: applier, recorder: recorder,
		strictContract: opts.StrictContract, updates: &updates{clients, reader, recorder},
	}
	return &Reconciler{
		clients: clients, machineReader: reader, recorder: recorder, Options: opts,
		prober: prober, workloads: workloads, machines: machines,
		metricsServers: &metricsServers{},
		manifests:      &userManifests{clients: clients},
		adoption:       &adoption{clients, reader, recorder},
		authorities:    &authorities{clients, secrets},
		kubeconfigs:    &kubeconfigs{clients, secrets},
		bootstrapData:  &bootstrapData{clients, opts.StrictContract},
		health:         &health{annotator: annotator, prober: prober, workloads: workloads, answered: answered},
		observation:    &observation{machineReader: reader, workloads: workloads, reached: &sightings{}},
		rotations:      &rotations{clients, secrets, annotator, recorder},
		restores: &restores{
			clients: clients, machineReader: reader, machineWriter: writer, annotator: annotator, recorder: recorder,
			workloads: workloads, stores: stores, machines: machines, answered: answered,
		},
		backups:       &backups{recorder: recorder, workloads: workloads, stores: stores},
		propagation:   &propagation{clients, applier},
		machineStatus: &machineStatus{writer},
		departures:    &departures{reader, writer, abandonment, recorder},
		remediations:  &remediations{clients, reader, writer, annotator, recorder},
		deletion:      &deletion{clients, reader, writer, secrets, abandonment},
	}
}

// scope is the control plane of one reconciliation, and its connections.
type scope struct {
	*model.ControlPlane
	// parts of each Machine, as findOutdated has read them last.
	parts map[string]machineParts
	// clusterGone: no Cluster exists, and that of the scope has only a name. The control plane is being deleted.
	clusterGone bool
	// certified: every Secret with keys exists and is valid. No Machine can be created otherwise.
	certified    bool
	endpoint     clusterv1.APIEndpoint
	certificates secret.Certificates
	// signer is the certificate authority that signs the kubeconfig; nil when nothing may be signed now.
	signer *certs.KeyPair
	// access reaches the API server; nil when the kubeconfig is refused.
	access *rest.Config
	// client of the workload cluster; nil without a connection.
	client client.Client
}

// answers reports whether the workload cluster has answered in this reconciliation. A request to one that is silent would hold up
// the next steps until its timeout.
func (s *scope) answers() bool { return s.client != nil && s.Workload.Err == nil }

// step is one part of a reconciliation.
type step func(ctx context.Context, s *scope) (result, error)

// runUntilStop runs steps in their order until one fails or stops the reconciliation, and adds their results to found. It differs from
// reconciling.RunSteps: a step that waits reports the cause as its result, and the later steps run nevertheless.
func runUntilStop(ctx context.Context, s *scope, found *result, steps ...step) error {
	for _, step := range steps {
		out, err := step(ctx, s)
		found.merge(out)
		if err != nil || out.stop {
			return err
		}
	}
	return nil
}

// +kubebuilder:rbac:groups=controlplane.capstan.dev,resources=capstancontrolplanes,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=controlplane.capstan.dev,resources=capstancontrolplanes/status,verbs=patch
// +kubebuilder:rbac:groups=controlplane.capstan.dev,resources=capstancontrolplanes/finalizers,verbs=update
// +kubebuilder:rbac:groups=bootstrap.capstan.dev,resources=capstanconfigs,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanclusters,verbs=get;list;watch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanmachines,verbs=get;list;watch;create;patch;delete
// Deletion of a template is the condition of the admission plugin OwnerReferencesPermissionEnforcement to change its owners. No template
// is deleted.
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanmachinetemplates,verbs=get;list;watch;patch;delete
// The kinds of others are not known: providers of this group give no role of their own, as those of other groups do
// (config/control-plane/rbac/infrastructure_role.yaml).
// +kubebuilder:rbac:groups=infrastructure.cluster.x-k8s.io,resources=*,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=clusters;machinepools,verbs=get;list;watch
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=machinedrainrules,verbs=list
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=machines/status,verbs=patch
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=machines/finalizers,verbs=update
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=machines,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups="",resources=secrets,verbs=get;list;watch;create;patch
// +kubebuilder:rbac:groups="",resources=configmaps,verbs=get
// +kubebuilder:rbac:groups="";events.k8s.io,resources=events,verbs=create;patch

// Reconcile implements reconcile.Reconciler. It finds the Cluster, honours pausing, runs the steps, and patches the status once.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (_ ctrl.Result, reterr error) {
	controlPlane := &controlplanev1.CapstanControlPlane{}
	if err := r.Client.Get(ctx, req.NamespacedName, controlPlane); err != nil {
		if apierrors.IsNotFound(err) {
			r.forget(req.NamespacedName)
		}
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !r.Options.Watches(controlPlane) {
		return ctrl.Result{}, nil
	}
	cluster, gone, err := r.clusterOf(ctx, controlPlane)
	if err != nil || cluster == nil {
		return ctrl.Result{}, err
	}
	s := &scope{ControlPlane: &model.ControlPlane{Object: controlPlane, Cluster: cluster, Workload: model.NotAsked(), Now: time.Now()}, clusterGone: gone}

	frame := reconciling.Frame{Client: r.Client, Live: r.LiveClient, Finalizer: controlplanev1.ControlPlaneFinalizer}
	patch, err := frame.Begin(ctx, cluster, controlPlane)
	if err != nil || patch == nil {
		return ctrl.Result{}, err
	}
	if controllerutil.ContainsFinalizer(controlPlane, formerFinalizer) && controlPlane.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, dropFormerFinalizer(ctx, r.Client, controlPlane) // The change is an event.
	}
	if s.Machines, err = r.ownMachines(ctx, r.Client, s); err != nil {
		return ctrl.Result{}, err
	}
	found, before := &result{}, controlPlane.DeepCopy()
	defer func() {
		setStatus(s, found)
		r.recordQuorum(s, before)
		reterr = errors.Join(reterr, patch.WriteStatus(ctx, controlPlane)) // The steps have written the metadata.
	}()
	if !controlPlane.DeletionTimestamp.IsZero() {
		r.prober.forget(req.NamespacedName)
		forgetEtcd(req.NamespacedName)
		err := runUntilStop(ctx, s, found, r.deletion.reconcile)
		return ctrl.Result{RequeueAfter: found.requeueAfter}, err
	}
	if err := r.reconcileNormal(ctx, s, found); err != nil {
		return ctrl.Result{}, err
	}
	return ctrl.Result{RequeueAfter: found.requeueAfter}, nil
}

// forget removes the memory about a deleted control plane.
func (r *Reconciler) forget(key client.ObjectKey) {
	r.prober.forget(key)
	forgetMetrics(key)
	r.workloads.leases.Forget(key)
	r.machines.trials.forget(key)
	for _, seen := range []*sightings{r.observation.reached, r.health.answered, &r.departures.abandonment.since} {
		seen.forgetAllBut(key)
	}
}

// reconcileNormal is the list of steps. No step waits for the provisioned infrastructure: once the endpoint is known,
// everything up to the first Machine is prepared, so that only the start of the machine remains after that.
func (r *Reconciler) reconcileNormal(ctx context.Context, s *scope, found *result) error {
	if err := runUntilStop(ctx, s, found,
		r.adoption.reconcile,
		r.infrastructure.ownTemplate,
		checkSpec,
		r.authorities.reconcile,
		r.infrastructure.reconcile,
		r.kubeconfigs.reconcile,
		r.bootstrapData.reconcile,
		r.health.reconcile,
		r.observation.reconcile,
		r.workloads.reconcile,
		r.metricsServers.reconcile,
		r.manifests.reconcile,
		reconcileExpiry,
	); err != nil || found.stop {
		return err
	}
	maintain := []step{r.propagation.reconcile, r.machineStatus.reconcile, r.machines.updates.hold, r.departures.reconcile, r.remediations.reconcile}
	s.Irreplaceable = irreplaceable(s)
	if s.Irreplaceable != "" {
		// Machines leave, and unhealthy ones are deleted if another one serves. No other one is deleted: it could not be replaced.
		found.merge(requeueAfter(model.UnhealthyRetry))
		return runUntilStop(ctx, s, found, append(maintain, r.machines.endUpdate)...)
	}
	err := runUntilStop(ctx, s, found, append([]step{r.rotations.reconcile, checkOwnership, r.restores.reconcile, r.backups.reconcile},
		append(maintain, r.machines.reconcile)...)...)
	// These change with time alone: a Machine counts as stuck, or becomes outdated.
	found.merge(requeueAfter(s.NextStuckDeletion(s.Now)))
	found.merge(requeueAfter(model.NextOutdated(s.Object, s.Machines.UnsortedList(), s.Now)))
	return err
}

// checkSpec reports a spec or a Cluster that cannot work. Nothing begins with one. Existing Machines are still maintained: their
// hooks would otherwise hold up their deletion.
func checkSpec(_ context.Context, s *scope) (result, error) {
	message := invalid(s)
	return result{blocked: message, stop: message != "" && len(s.Machines) == 0 && !s.Initialized()}, nil
}

// irreplaceable returns the reason why no Machine can be created; "" when one can. The number of Machines does not matter.
func irreplaceable(s *scope) string {
	if !s.certified {
		return noCertificates
	}
	return invalid(s)
}

// checkOwnership stops when the Machines of the control plane cannot be determined.
func checkOwnership(_ context.Context, s *scope) (result, error) {
	if s.Ambiguous == "" {
		return result{}, nil
	}
	return result{blocked: s.Ambiguous, refused: []string{s.Ambiguous}, stop: true, requeueAfter: model.UnhealthyRetry}, nil
}

// invalid returns the problem of the spec or of the Cluster. A change by the user is an event.
func invalid(s *scope) string {
	if _, err := render.Version(s.Object.Spec.Version); err != nil {
		return "spec.version: " + err.Error()
	}
	network, err := render.Network(s.Cluster, render.WithDefaults(s.Object.Spec.Config.Cluster))
	if err != nil {
		return err.Error()
	}
	if err := render.CheckEndpoint(s.Cluster.Spec.ControlPlaneEndpoint.Host, network); err != nil {
		return err.Error()
	}
	return ""
}
