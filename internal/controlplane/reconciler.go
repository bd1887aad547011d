// Package controlplane is the control plane provider: it makes the Machines that a cluster's API
// servers run on, with everything they need, and says how they are (CP-01 to CP-25).
package controlplane

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	"sigs.k8s.io/cluster-api/controllers/external"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/certs"
	"sigs.k8s.io/cluster-api/util/collections"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/finalizers"
	"sigs.k8s.io/cluster-api/util/secret"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/render"
	"capstan.dev/capstan/internal/bootstrap/status"
	"capstan.dev/capstan/internal/manager"
)

// unhealthyRetry is how often a control plane that does not answer, or says that it is not ready, is
// asked again: its recovery is no event in the management cluster.
const unhealthyRetry = 5 * time.Second

// grace is for how long what was last known of a workload cluster stands in conditions, when it cannot be
// asked: a manager that starts, or a connection that blinks, changes nothing. Decisions never rest on it.
const grace = 2 * time.Minute

// now is the clock.
var now = time.Now

// Reconciler reconciles CapstanControlPlanes.
type Reconciler struct {
	// Client reads from the cache, but for Secrets, and writes.
	Client client.Client
	// LiveClient reads from the API server.
	LiveClient client.Client
	// SecretClient reads Secrets with the cluster-name label from the cache.
	SecretClient client.Client
	// ClusterCache connects to workload clusters; its connections are events here.
	ClusterCache clustercache.ClusterCache
	// Options hold the watch filter (ALL-07).
	Options manager.Options

	prober     *prober
	tracker    external.ObjectTracker
	controller controller.Controller
	recorder   events.EventRecorder
	applied    memory
	renewals   renewals
	// installed is what was brought into workload clusters.
	installed memory
	// trials are Machines that could not be made.
	trials trials
	// known is when a workload cluster could last be asked, and answered when its API server could last use etcd.
	known, answered sightings
	// abandoned is since when nothing but the Machine is left of a machine.
	abandoned sightings
}

// scope is what one reconciliation works on, and what its steps have found.
type scope struct {
	controlPlane *controlplanev1.CapstanControlPlane
	cluster      *clusterv1.Cluster
	// uncertified says that a Secret with keys is missing or broken: no Machine can be made.
	uncertified bool
	// machines of the control plane.
	machines collections.Machines
	// mixed is why it is not certain which Machines belong to the control plane: nothing is decided about any of them.
	mixed string
	// infraCluster is the infrastructure's own object; read only until core has copied everything from it.
	infraCluster *unstructured.Unstructured
	endpoint     clusterv1.APIEndpoint
	certificates secret.Certificates
	// signer is the authority that signs the kubeconfig; nil when nothing may be signed now.
	signer *certs.KeyPair
	// authority is the secret of the cluster's certificate authority.
	authority *corev1.Secret
	// kubeconfigNote is what the condition KubeconfigAvailable says when it is True.
	kubeconfigNote string
	// access is how the API server is reached; nil when the kubeconfig is refused.
	access *rest.Config
	// outdated says for each Machine by name why it is not up to date.
	outdated map[string][]string
	// workload is what the workload cluster says of its machines.
	workload *workload
	// blink says that the workload cluster could be asked a moment ago, and cannot now.
	blink bool
	// answer is what the API server says through the endpoint; nil when it was not asked.
	answer *reply
	// blocked is why no Machine can be made or removed.
	blocked string
	// again is when to try once more to make a Machine; 0 when that is not needed.
	again time.Duration
	// held is why another version cannot be rolled out.
	held string
	// restoreSource is the backup that the first machine begins with.
	restoreSource *bootstrapv1.RestoreSource
	// unchecked is why no machine has looked at it before the restore began.
	unchecked string
	// departing says what keeps Machines and etcd members that are to go; remediating what is repaired; unchanged what
	// could not be brought to the Machines.
	departing, remediating, unchanged []string
	// going is since when the infrastructure of Machines that are being deleted has been going, by the Machine's name.
	going map[string]time.Time
	// deletingReason and deletingMessage say how far the deletion is.
	deletingReason, deletingMessage string
}

// +kubebuilder:rbac:groups=controlplane.capstan.dev,resources=capstancontrolplanes,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=controlplane.capstan.dev,resources=capstancontrolplanes/status,verbs=patch
// +kubebuilder:rbac:groups=controlplane.capstan.dev,resources=capstancontrolplanes/finalizers,verbs=update
// +kubebuilder:rbac:groups=bootstrap.capstan.dev,resources=capstanconfigs,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanclusters,verbs=get;list;watch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanmachines,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanmachinetemplates,verbs=get;list;watch;patch
// The kinds of others are not known: providers of this group give no role of their own, as those of other groups do
// (config/control-plane/rbac/infrastructure_role.yaml).
// +kubebuilder:rbac:groups=infrastructure.cluster.x-k8s.io,resources=*,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=clusters;machinepools,verbs=get;list;watch
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=machines/status,verbs=patch
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=machines,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups="",resources=secrets,verbs=get;list;watch;create;patch
// +kubebuilder:rbac:groups="";events.k8s.io,resources=events,verbs=create;patch
// +kubebuilder:rbac:groups=apiextensions.k8s.io,resources=customresourcedefinitions,verbs=get;list;watch

// Reconcile finds the Cluster, honours pausing, runs the steps, and patches the status once.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (_ ctrl.Result, reterr error) {
	controlPlane := &controlplanev1.CapstanControlPlane{}
	if err := r.Client.Get(ctx, req.NamespacedName, controlPlane); err != nil {
		r.prober.forget(req.NamespacedName)
		forgetMetrics(req.NamespacedName)
		r.renewals.forget(req.NamespacedName)
		r.trials.forget(req.NamespacedName)
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !r.Options.Watches(controlPlane) {
		return ctrl.Result{}, nil
	}
	cluster, err := util.GetOwnerCluster(ctx, r.Client, controlPlane.ObjectMeta)
	if err != nil || cluster == nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	s := &scope{controlPlane: controlPlane, cluster: cluster, workload: &workload{err: errors.New("it was not asked")}}

	before := controlPlane.DeepCopy()
	if status.SetPaused(cluster, controlPlane) {
		return ctrl.Result{}, status.Patch(ctx, r.Client, before, controlPlane)
	}
	if added, err := finalizers.EnsureFinalizer(ctx, r.Client, controlPlane, controlplanev1.ControlPlaneFinalizer); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	} else if added {
		before = controlPlane.DeepCopy()
		status.SetPaused(cluster, controlPlane)
	}
	if controllerutil.ContainsFinalizer(controlPlane, formerFinalizer) && controlPlane.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, r.dropFormerFinalizer(ctx, controlPlane) // The change is an event.
	}
	if s.machines, err = r.ownMachines(ctx, r.Client, s); err != nil {
		return ctrl.Result{}, err
	}
	defer func() {
		setStatus(s)
		r.tellQuorum(s, before)
		if err := status.Patch(ctx, r.Client, before, controlPlane); err != nil && reterr == nil {
			reterr = err
		}
	}()
	if !controlPlane.DeletionTimestamp.IsZero() {
		return r.reconcileDelete(ctx, s)
	}
	if err := r.reconcileOwnership(ctx, s); err != nil {
		return ctrl.Result{}, err
	}
	return r.reconcileNormal(ctx, s)
}

// noCertificates is why no Machine is made; the condition CertificatesAvailable names the Secret.
const noCertificates = "certificates are not available"

// reconcileNormal is the list of steps. None of them waits for the infrastructure to be provisioned:
// once there is an endpoint everything up to the first Machine is prepared, so that after
// `provisioned` only the start of the machine itself remains.
func (r *Reconciler) reconcileNormal(ctx context.Context, s *scope) (ctrl.Result, error) {
	if err := r.ownInfraTemplate(ctx, s); err != nil {
		return ctrl.Result{}, err
	}
	if message := invalid(s); message != "" {
		s.blocked = message
		return ctrl.Result{}, nil
	}
	certified, err := r.reconcileCertificates(ctx, s)
	if !certified {
		s.blocked, s.uncertified = noCertificates, true
	}
	if err != nil || !certified && !s.initialized() {
		return ctrl.Result{}, err
	}
	if done, err := r.reconcileEndpoint(ctx, s); err != nil || !done {
		s.blocked = "the control plane endpoint is not known yet"
		return ctrl.Result{}, err
	}
	renew, err := r.reconcileKubeconfig(ctx, s)
	if err != nil {
		return ctrl.Result{}, err
	}
	if err := r.nameData(ctx, s); err != nil {
		return ctrl.Result{}, err
	}
	retry, err := r.reconcileHealth(ctx, s)
	if err != nil {
		return ctrl.Result{}, err
	}
	look, err := r.observe(ctx, s)
	if err != nil {
		return ctrl.Result{}, err
	}
	r.reconcileInstalled(ctx, s)
	expire := reconcileExpiry(s)
	if s.uncertified {
		// Machines go and are repaired, and none is made.
		repair, err := r.reconcileEverything(ctx, s)
		s.blocked = noCertificates
		return util.LowestNonZeroResult(ctrl.Result{RequeueAfter: repair}, util.LowestNonZeroResult(ctrl.Result{RequeueAfter: renew}, ctrl.Result{RequeueAfter: max(look, unhealthyRetry)})), err
	}
	rotate := r.reconcileRotation(ctx, s)
	if s.mixed != "" {
		s.blocked, s.unchanged = s.mixed, append(s.unchanged, s.mixed)
		return util.LowestNonZeroResult(ctrl.Result{RequeueAfter: unhealthyRetry}, ctrl.Result{RequeueAfter: retry}), nil
	}
	busy, restore, err := r.reconcileRestore(ctx, s)
	if err != nil || busy {
		return util.LowestNonZeroResult(ctrl.Result{RequeueAfter: restore}, ctrl.Result{RequeueAfter: retry}), err
	}
	backup := r.reconcileBackups(ctx, s)
	repair, err := r.reconcileEverything(ctx, s)
	result := ctrl.Result{}
	// Time alone changes these: the kubeconfig's certificate ages, a silence lasts, a pause ends.
	for _, after := range []time.Duration{renew, expire, retry, look, rotate, restore, backup, repair, s.again, s.nextStuck(now()), nextOutdated(s.controlPlane, s.machines.UnsortedList(), now())} {
		result = util.LowestNonZeroResult(result, ctrl.Result{RequeueAfter: after})
	}
	return result, err
}

// reconcileEverything is what follows once it is known how the machines are. A Machine that refuses a change keeps
// none from leaving, nor from being repaired.
func (r *Reconciler) reconcileEverything(ctx context.Context, s *scope) (repair time.Duration, err error) {
	refused := r.reconcilePropagation(ctx, s)
	repair, err = r.reconcileLife(ctx, s)
	return repair, errors.Join(refused, err)
}

// reconcileLife lets Machines go, repairs them, and makes what is missing.
func (r *Reconciler) reconcileLife(ctx context.Context, s *scope) (repair time.Duration, err error) {
	if err := r.reconcileMachineConditions(ctx, s); err != nil {
		return 0, err
	}
	if err := r.reconcileDepartures(ctx, s); err != nil {
		return 0, err
	}
	acted, repair, err := r.reconcileRemediation(ctx, s)
	if err != nil || acted {
		return repair, err
	}
	return repair, r.reconcileMachines(ctx, s)
}

// observe finds out how the Machines are: what the spec would make of them now, and what the workload
// cluster says. again is when that has grown old.
func (r *Reconciler) observe(ctx context.Context, s *scope) (again time.Duration, err error) {
	if err := r.findOutdated(ctx, s); err != nil {
		return 0, err
	}
	s.workload = r.look(ctx, s)
	measure(s)
	if !s.initialized() {
		return 0, nil
	}
	if f := s.fleet(); f.unknown == "" {
		r.known.saw(s.controlPlane.UID, now())
		return f.lookAgain(s.workload.stale(now()), now()), nil
	}
	s.blink = now().Sub(r.known.last(s.controlPlane.UID, now())) < grace
	switch {
	case s.workload.client == nil:
		return 0, nil // A connection that is made is an event.
	case s.workload.care.alive(now()) == metav1.ConditionUnknown:
		return firstRetry, nil
	}
	return silentRetry(s.controlPlane, now()), nil
}

// firstRetry is how often Leases are read that we met a moment ago: their next renewal tells, and is no event.
const firstRetry = 2 * time.Second

// joiningRetry is how often a Machine that is joining is looked at: when its API server begins to serve
// that is no event. After joiningTime it is no more urgent than others.
const (
	joiningRetry = time.Second
	joiningTime  = 5 * time.Minute
)

// lookAgain is when the workload cluster has to be asked again without any event.
func (f fleet) lookAgain(stale time.Duration, now time.Time) time.Duration {
	for _, i := range f.active() {
		if i.apiServer != metav1.ConditionTrue && now.Sub(i.machine.CreationTimestamp.Time) < joiningTime {
			return joiningRetry
		}
	}
	if slices.ContainsFunc(f.active(), func(i *instance) bool { return i.apiServer == metav1.ConditionUnknown }) {
		return firstRetry
	}
	return max(stale, unhealthyRetry)
}

// silentRetry is when to ask again a workload cluster that does not tell how its etcd is: the kind may not
// be there yet, and nothing tells when it is. The older the cluster, the longer.
func silentRetry(controlPlane *controlplanev1.CapstanControlPlane, now time.Time) time.Duration {
	age := time.Minute
	if c := conditions.Get(controlPlane, controlplanev1.InitializedCondition); c != nil {
		age = now.Sub(c.LastTransitionTime.Time)
	}
	return min(max(age/4, 500*time.Millisecond), 10*time.Second)
}

// everybody is what is known of all Machines now.
func (s *scope) everybody() fleet {
	return newFleet(s.machines, s.outdated, s.stacked(), s.workload, now())
}

// fleet is what is known of the Machines that matter: those that are stuck do not.
func (s *scope) fleet() fleet {
	f := s.everybody()
	if !s.initialized() {
		return f // The first Machine begins a cluster: there must never be two.
	}
	return f.withoutStuck(s.going, now())
}

// stacked says that etcd runs on the Machines.
func (s *scope) stacked() bool {
	return len(s.controlPlane.Spec.Config.Cluster.Etcd.External.Endpoints) == 0
}

// wish is what the spec says about the number of Machines.
func (s *scope) wish() wish {
	out := wish{
		replicas: int(ptr.Deref(s.controlPlane.Spec.Replicas, 1)), maxSurge: 1,
		initialized: s.initialized(), held: s.held, domains: forControlPlanes(failureDomains(s)),
	}
	if surge := s.controlPlane.Spec.Rollout.Strategy.RollingUpdate.MaxSurge; surge != nil && out.replicas >= 3 {
		out.maxSurge = surge.IntValue()
	}
	return out
}

// tellQuorum tells when etcd has lost its majority, and when it has it again.
func (r *Reconciler) tellQuorum(s *scope, before *controlplanev1.CapstanControlPlane) {
	lost := func(cp *controlplanev1.CapstanControlPlane) bool {
		return conditions.GetReason(cp, controlplanev1.EtcdClusterHealthyCondition) == controlplanev1.QuorumLostReason
	}
	switch was, is := lost(before), lost(s.controlPlane); {
	case is && !was:
		r.event(s, corev1.EventTypeWarning, controlplanev1.QuorumLostReason, "Observe", "%s", conditions.GetMessage(s.controlPlane, controlplanev1.EtcdClusterHealthyCondition))
	case was && !is:
		r.event(s, corev1.EventTypeNormal, "QuorumRegained", "Observe", "etcd may have its majority again; see EtcdClusterHealthy")
	}
}

// event tells the users.
func (r *Reconciler) event(s *scope, kind, reason, action, format string, args ...any) {
	if r.recorder != nil {
		r.recorder.Eventf(s.controlPlane, nil, kind, reason, action, format, args...)
	}
}

// invalid says what in the spec or in the Cluster cannot work; a change by the user is an event.
func invalid(s *scope) string {
	if _, err := render.Version(s.controlPlane.Spec.Version); err != nil {
		return "spec.version: " + err.Error()
	}
	network, err := render.Network(s.cluster, render.WithDefaults(s.controlPlane.Spec.Config.Cluster))
	if err != nil {
		return err.Error()
	}
	if err := render.CheckEndpoint(s.cluster.Spec.ControlPlaneEndpoint.Host, network); err != nil {
		return err.Error()
	}
	return ""
}

// reconcileEndpoint finds the endpoint: on the Cluster, or, before core has copied it there, in the
// contract's field of the infrastructure's own object (CP-02), unless core's order is kept strictly.
func (r *Reconciler) reconcileEndpoint(ctx context.Context, s *scope) (done bool, err error) {
	s.endpoint = s.cluster.Spec.ControlPlaneEndpoint
	provisioned := ptr.Deref(s.cluster.Status.Initialization.InfrastructureProvisioned, false)
	if provisioned && s.endpoint.IsValid() || !s.cluster.Spec.InfrastructureRef.IsDefined() || r.Options.StrictContract {
		return s.endpoint.IsValid(), nil
	}
	infraCluster, err := external.GetObjectFromContractVersionedRef(ctx, r.Client, s.cluster.Spec.InfrastructureRef, s.cluster.Namespace)
	if err != nil {
		return s.endpoint.IsValid(), client.IgnoreNotFound(err)
	}
	s.infraCluster = infraCluster
	if err := r.watchInfraCluster(ctx, s.infraCluster); err != nil || s.endpoint.IsValid() {
		return s.endpoint.IsValid(), err
	}
	host, _, _ := unstructured.NestedString(s.infraCluster.Object, "spec", "controlPlaneEndpoint", "host")
	port, _, _ := unstructured.NestedInt64(s.infraCluster.Object, "spec", "controlPlaneEndpoint", "port")
	s.endpoint = clusterv1.APIEndpoint{Host: host, Port: int32(port)}
	return s.endpoint.IsValid(), nil
}

// reconcileHealth sets controlPlaneInitialized when the API server has answered through the endpoint,
// once and for all (CP-09); from then on it asks how the control plane is. An annotation says so too: it
// outlives a move, which loses the status.
func (r *Reconciler) reconcileHealth(ctx context.Context, s *scope) (retry time.Duration, err error) {
	if !s.initialized() {
		if len(s.machines) == 0 || s.access == nil {
			return 0, nil
		}
		answered, err := r.prober.answeredOrAsk(s.controlPlane, s.access) //nolint:contextcheck // its probes outlive this call
		if err != nil || !answered {
			return 0, err
		}
		r.renewals.begin(client.ObjectKeyFromObject(s.controlPlane), now())
	}
	if err := r.annotate(ctx, s, controlplanev1.InitializedAnnotation, "true"); err != nil {
		return 0, err
	}
	s.controlPlane.Status.Initialization.ControlPlaneInitialized = ptr.To(true)
	r.prober.forget(client.ObjectKeyFromObject(s.controlPlane))
	if s.access == nil {
		s.answer = &reply{err: errRefused}
		return 0, nil // A change of the Secret is an event.
	}
	s.answer = &reply{}
	s.answer.ready, s.answer.failed, s.answer.err = health(ctx, s.access)
	if s.answer.usesEtcd() {
		r.answered.saw(s.controlPlane.UID, now())
	}
	if !s.answer.ready {
		return unhealthyRetry, nil
	}
	return 0, nil
}

// ownInfraTemplate links the infrastructure template to the Cluster, so that it moves and goes with it (ALL-11).
func (r *Reconciler) ownInfraTemplate(ctx context.Context, s *scope) error {
	template, err := r.infraTemplate(ctx, s)
	if err != nil || template == nil {
		return err
	}
	ref := metav1.OwnerReference{APIVersion: clusterv1.GroupVersion.String(), Kind: "Cluster", Name: s.cluster.Name, UID: s.cluster.UID}
	if util.HasExactOwnerRef(template.GetOwnerReferences(), ref) {
		return nil
	}
	before := template.DeepCopy()
	template.SetOwnerReferences(util.EnsureOwnerRef(template.GetOwnerReferences(), ref))
	return r.Client.Patch(ctx, template, client.MergeFrom(before))
}

// infraTemplate is the template of the infrastructure machines; nil when it does not exist, which
// s.blocked then says.
func (r *Reconciler) infraTemplate(ctx context.Context, s *scope) (*unstructured.Unstructured, error) {
	ref := s.controlPlane.Spec.MachineTemplate.Spec.InfrastructureRef
	template, err := external.GetObjectFromContractVersionedRef(ctx, r.Client, ref, s.controlPlane.Namespace)
	if err != nil {
		if client.IgnoreNotFound(err) == nil {
			s.blocked = fmt.Sprintf("the %s %s does not exist", ref.Kind, ref.Name)
			return nil, r.watchTemplates(ctx, ref)
		}
		return nil, err
	}
	return template, nil
}

// sightings are when workload clusters could last be asked.
type sightings struct {
	mu sync.Mutex
	at map[types.UID]time.Time
}

func (k *sightings) saw(uid types.UID, at time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.at == nil {
		k.at = map[types.UID]time.Time{}
	}
	k.at[uid] = at
}

// last is when a workload cluster could last be asked; for one that was never asked that is now.
func (k *sightings) last(uid types.UID, now time.Time) time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.at == nil {
		k.at = map[types.UID]time.Time{}
	}
	if _, ok := k.at[uid]; !ok {
		k.at[uid] = now
	}
	return k.at[uid]
}
