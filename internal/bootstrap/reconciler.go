// Package bootstrap is the bootstrap provider: it makes the bootstrap data of machines from their
// CapstanConfigs (BC-01 to BC-06), and looks after the bootstrap tokens of workers.
//
// Layer: reconciler.
package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/clustercache"
	"sigs.k8s.io/cluster-api/controllers/external"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/conditions"
	capicontroller "sigs.k8s.io/cluster-api/util/controller"
	"sigs.k8s.io/cluster-api/util/secret"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/render"
	"capstan.dev/capstan/internal/kubeconfig"
	"capstan.dev/capstan/internal/reconciling"
)

// missingSecretRetry is how often a Secret that the user named and that is not there is looked for:
// such Secrets need no label, so they are not in the cache, and their creation is no event.
const missingSecretRetry = 10 * time.Second

// Reconciler makes the bootstrap data of machines.
type Reconciler struct {
	// Client reads from the cache, but for Secrets, and writes.
	Client client.Client
	// SecretClient reads Secrets with the cluster-name label from the cache.
	SecretClient client.Client
	// LiveClient reads from the API server; see reconciling.Frame.
	LiveClient client.Client
	// ClusterCache connects to workload clusters.
	ClusterCache clustercache.ClusterCache
	// Options hold the watch filter (ALL-07).
	Options reconciling.Options

	// Now is the clock; time.Now when nil.
	Now func() time.Time

	controller capicontroller.Controller
	tracker    external.ObjectTracker
	recorder   events.EventRecorder
}

// scope is what one reconciliation works on.
type scope struct {
	config  *bootstrapv1.CapstanConfig
	owner   *owner
	cluster *clusterv1.Cluster
	// controlPlane of the cluster, if it is one of ours.
	controlPlane *controlplanev1.CapstanControlPlane
	// data is the bootstrap data, once it is there.
	data []byte
}

// +kubebuilder:rbac:groups=bootstrap.capstan.dev,resources=capstanconfigs,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=bootstrap.capstan.dev,resources=capstanconfigs/status,verbs=patch
// +kubebuilder:rbac:groups=bootstrap.capstan.dev,resources=capstanconfigs/finalizers,verbs=update
// +kubebuilder:rbac:groups=controlplane.capstan.dev,resources=capstancontrolplanes,verbs=get;list;watch
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=clusters;machines;machinepools,verbs=get;list;watch
// +kubebuilder:rbac:groups="",resources=secrets,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups="";events.k8s.io,resources=events,verbs=create;patch

// Reconcile follows the contract's list: owner, Cluster, pause, data secret, status, one patch (BC-04).
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (_ ctrl.Result, reterr error) {
	config := &bootstrapv1.CapstanConfig{}
	if err := r.Client.Get(ctx, req.NamespacedName, config); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !config.DeletionTimestamp.IsZero() || !r.Options.Watches(config) {
		return ctrl.Result{}, nil // The data secret goes with its owner; a token that is left expires.
	}
	s, err := r.scope(ctx, config)
	if err != nil || s == nil {
		return ctrl.Result{}, err
	}

	frame := r.frame()
	patch, err := frame.Begin(ctx, s.cluster, config)
	if err != nil || patch == nil {
		return ctrl.Result{}, err
	}
	defer func() { reterr = errors.Join(reterr, frame.End(ctx, patch, config)) }()
	result, err := r.reconcileNormal(ctx, s)
	if err == nil && r.controller != nil {
		// The cluster and the machine wait for each step, and all causes of the next step are events.
		r.controller.DeferNextReconcile(req, time.Now())
	}
	return result, err
}

// frame of each reconcile. A CapstanConfig has no finalizer: its data secret has an owner reference, and a token expires.
func (r *Reconciler) frame() *reconciling.Frame {
	return &reconciling.Frame{Client: r.Client, Live: r.LiveClient}
}

func (r *Reconciler) reconcileNormal(ctx context.Context, s *scope) (ctrl.Result, error) {
	result, err := r.reconcileData(ctx, s)
	setReady(s.config)
	if err != nil || s.data == nil {
		return result, err
	}
	if err := r.dropFormerData(ctx, s); err != nil {
		return ctrl.Result{}, err
	}
	token, err := r.reconcileToken(ctx, s)
	return util.LowestNonZeroResult(result, token), err
}

// scope finds what a config belongs to; nil when that is not there yet.
func (r *Reconciler) scope(ctx context.Context, config *bootstrapv1.CapstanConfig) (*scope, error) {
	owner, err := findOwner(ctx, r.Client, config)
	if err != nil || owner == nil {
		return nil, err
	}
	cluster, err := util.GetClusterByName(ctx, r.Client, config.Namespace, owner.clusterName)
	if err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	s := &scope{config: config, owner: owner, cluster: cluster}
	if !isCapstanControlPlane(cluster) {
		return s, nil
	}
	// Only watched once it is needed: the control plane provider need not be installed.
	controlPlane := &controlplanev1.CapstanControlPlane{}
	controlPlane.SetGroupVersionKind(controlplanev1.GroupVersion.WithKind("CapstanControlPlane"))
	if err := r.watchControlPlanes(ctx, controlPlane); err != nil {
		return nil, err
	}
	key := client.ObjectKey{Namespace: cluster.Namespace, Name: cluster.Spec.ControlPlaneRef.Name}
	if err := r.Client.Get(ctx, key, controlPlane); err != nil {
		return s, client.IgnoreNotFound(err)
	}
	s.controlPlane = controlPlane
	return s, nil
}

// reconcileData keeps the data secret, or makes it when everything it needs is there (BC-02, BC-03).
func (r *Reconciler) reconcileData(ctx context.Context, s *scope) (ctrl.Result, error) {
	data, err := r.dataSecret(ctx, s)
	if n, ok := asNotYet(err); ok {
		setData(s.config, metav1.ConditionFalse, n.reason, n.message)
		if s.data, err = r.formerData(ctx, s); err != nil {
			return ctrl.Result{}, err
		}
		if n.unseen {
			return ctrl.Result{RequeueAfter: missingSecretRetry}, nil
		}
		return ctrl.Result{}, nil
	}
	if err != nil && !errors.Is(err, errUsed) {
		setData(s.config, metav1.ConditionFalse, bootstrapv1.DataSecretNotAvailableReason, err.Error())
		return ctrl.Result{}, err
	}
	s.data = data
	s.config.Status.DataSecretName = dataSecretName(s)
	s.config.Status.Initialization.DataSecretCreated = ptr.To(true)
	if err != nil {
		setData(s.config, metav1.ConditionTrue, bootstrapv1.DataSecretUsedReason,
			fmt.Sprintf("The Secret %s was deleted after the machine had used it. It is not created again", dataSecretName(s)))
		return ctrl.Result{}, nil
	}
	setData(s.config, metav1.ConditionTrue, bootstrapv1.DataSecretAvailableReason, "")
	return ctrl.Result{}, nil
}

// errUsed: the data Secret is gone, and the machine does not need it any more.
var errUsed = errors.New("the bootstrap data was used")

// dataSecretName can be recomputed from the config, for a pool together with its MachinePool (BC-02).
func dataSecretName(s *scope) string {
	if s.owner.pool != nil {
		return poolSecretName(s.config, s.owner.version)
	}
	return s.config.Name
}

// dataSecret returns the bootstrap data: what is there already, else what is made now. Data that is
// there is kept whatever the spec says, because the machine may have used it (BC-04, ALL-17). Data that is gone is made again
// only as long as the machine has not started.
func (r *Reconciler) dataSecret(ctx context.Context, s *scope) ([]byte, error) {
	key := client.ObjectKey{Namespace: s.config.Namespace, Name: dataSecretName(s)}
	existing := &corev1.Secret{}
	err := r.SecretClient.Get(ctx, key, existing)
	if apierrors.IsNotFound(err) && s.owner.started {
		// The cache has only Secrets with the cluster's label, which a backup tool may not restore.
		if err = r.Client.Get(ctx, key, existing); apierrors.IsNotFound(err) {
			return nil, errUsed
		}
	}
	if apierrors.IsNotFound(err) {
		return r.recreateDataSecret(ctx, s, key)
	}
	if err != nil {
		return nil, err
	}
	return r.adopt(ctx, s, existing)
}

// recreateDataSecret is createDataSecret, and an event if there was a Secret before: the machine, which has not started, gets
// the data of the current specification.
func (r *Reconciler) recreateDataSecret(ctx context.Context, s *scope, key client.ObjectKey) ([]byte, error) {
	data, err := r.createDataSecret(ctx, s, key)
	if err == nil && s.config.Status.DataSecretName == key.Name && r.recorder != nil {
		r.recorder.Eventf(s.config, nil, corev1.EventTypeWarning, "DataSecretRecreated", "Create",
			"Created the deleted Secret %s again, from the current specification", key.Name)
	}
	return data, err
}

func (r *Reconciler) createDataSecret(ctx context.Context, s *scope, key client.ObjectKey) ([]byte, error) {
	in, err := r.input(ctx, s)
	if err != nil {
		return nil, err
	}
	data, err := render.CloudConfig(in)
	if err != nil {
		return nil, waitFor(bootstrapv1.InvalidConfigReason, "%s", err)
	}
	created := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: key.Namespace,
			Name:      key.Name,
			Labels:    map[string]string{clusterv1.ClusterNameLabel: s.cluster.Name},
			Annotations: map[string]string{
				bootstrapv1.KubernetesVersionAnnotation: in.KubernetesVersion,
				bootstrapv1.AuthoritiesAnnotation:       namedAuthorities(in.Certificates),
				bootstrapv1.TokenIDsAnnotation:          tokenID(in.Token),
			},
			OwnerReferences: []metav1.OwnerReference{controllerRef(s.config)},
		},
		Type: clusterv1.ClusterSecretType,
		// `value` alone, as the contract says: cloud-config is the only format there is.
		Data: map[string][]byte{secret.KubeconfigDataName: data},
	}
	err = r.Client.Create(ctx, created)
	if apierrors.IsAlreadyExists(err) {
		// The cache was behind: what is stored wins.
		if err := r.Client.Get(ctx, key, created); err != nil {
			return nil, err
		}
		return r.adopt(ctx, s, created)
	}
	if err == nil {
		ctrl.LoggerFrom(ctx).Info("Created the bootstrap data", "Secret", klog.KObj(created), "version", in.KubernetesVersion, "tokenID", tokenID(in.Token))
	}
	return data, err
}

// adopt takes a secret that is there, also one that a backup brought back without its owner.
func (r *Reconciler) adopt(ctx context.Context, s *scope, existing *corev1.Secret) ([]byte, error) {
	data := existing.Data[secret.KubeconfigDataName]
	if existing.Type != clusterv1.ClusterSecretType || len(data) == 0 {
		return nil, &notYet{reason: bootstrapv1.InvalidConfigReason, unseen: true, message: fmt.Sprintf(
			"the secret %s is in the way: bootstrap data goes there, but it has the type %q and is not ours; delete or rename it", existing.Name, existing.Type)}
	}
	ref, controller := controllerRef(s.config), metav1.GetControllerOf(existing)
	if controller != nil && !isController(existing, s.config) {
		return nil, &notYet{reason: bootstrapv1.InvalidConfigReason, unseen: true, message: fmt.Sprintf(
			"the secret %s is in the way: it belongs to %s %s", existing.Name, controller.Kind, controller.Name)}
	}
	if !util.HasExactOwnerRef(existing.OwnerReferences, ref) {
		before := existing.DeepCopy()
		existing.OwnerReferences = util.EnsureOwnerRef(slices.Clone(existing.OwnerReferences), ref)
		if err := r.Client.Patch(ctx, existing, client.MergeFrom(before)); err != nil {
			return nil, err
		}
	}
	return r.refreshAuthorities(ctx, s, existing)
}

// isController is true if the config is the controller of an object, by group, kind and name: a reference may have an older
// version, or the UID that the config had before it was restored.
func isController(obj metav1.Object, config *bootstrapv1.CapstanConfig) bool {
	return util.IsControlledBy(obj, config, bootstrapv1.GroupVersion.WithKind("CapstanConfig").GroupKind())
}

func controllerRef(config *bootstrapv1.CapstanConfig) metav1.OwnerReference {
	return *metav1.NewControllerRef(config, bootstrapv1.GroupVersion.WithKind("CapstanConfig"))
}

// reconcileToken makes the token of the bootstrap data work in the workload cluster for as long as the
// machine has not joined, and removes it then.
func (r *Reconciler) reconcileToken(ctx context.Context, s *scope) (ctrl.Result, error) {
	token, err := render.Token(s.data)
	if err != nil || token == "" {
		return ctrl.Result{}, err
	}
	if s.owner.joined || s.owner.deleting {
		return ctrl.Result{}, r.dropToken(ctx, s, token)
	}
	workload, err := r.workloadClient(ctx, s)
	if refused := (*kubeconfig.RefusedError)(nil); errors.As(err, &refused) {
		setToken(s.config, metav1.ConditionFalse, bootstrapv1.BootstrapTokenWaitingReason, err.Error())
		return ctrl.Result{}, nil // A change of the Secret is an event.
	}
	if err != nil || workload == nil {
		setToken(s.config, metav1.ConditionFalse, bootstrapv1.BootstrapTokenWaitingReason, "the workload cluster is not reachable yet")
		return ctrl.Result{}, err
	}
	again, err := r.ensureToken(ctx, s, workload, token)
	if err != nil {
		setToken(s.config, metav1.ConditionFalse, bootstrapv1.BootstrapTokenWaitingReason, err.Error())
		return ctrl.Result{}, err
	}
	setToken(s.config, metav1.ConditionTrue, bootstrapv1.BootstrapTokenAvailableReason, "")
	// Time itself is what makes a token expire.
	return ctrl.Result{RequeueAfter: again}, nil
}

// ensureToken writes or rotates the token if that is due, and returns when to look again. A rotation changes the data
// Secret, which is an event.
func (r *Reconciler) ensureToken(ctx context.Context, s *scope, workload client.Client, token string) (time.Duration, error) {
	existing, err := readToken(ctx, workload, token, s.config)
	if err != nil {
		return 0, err
	}
	ttl := s.owner.tokenTTL()
	switch step, again := nextTokenStep(existing, s.owner.pool != nil, ttl, r.now()); step {
	case rotateToken:
		return 0, r.rotate(ctx, s, token)
	case writeToken:
		return again, putToken(ctx, workload, token, existing, s.config, r.now().Add(ttl))
	default:
		return again, nil
	}
}

// dropToken removes the token once; the condition remembers that there is one. If it is lost, the
// token expires by itself.
func (r *Reconciler) dropToken(ctx context.Context, s *scope, token string) error {
	if !conditions.IsTrue(s.config, bootstrapv1.BootstrapTokenAvailableCondition) {
		setToken(s.config, metav1.ConditionFalse, bootstrapv1.BootstrapTokenRemovedReason, "")
		return nil
	}
	workload, err := r.workloadClient(ctx, s)
	if err != nil || workload == nil {
		return err
	}
	if err := removeToken(ctx, workload, token, s.config); err != nil {
		return err
	}
	setToken(s.config, metav1.ConditionFalse, bootstrapv1.BootstrapTokenRemovedReason, "")
	return nil
}

func (r *Reconciler) now() time.Time {
	if r.Now != nil {
		return r.Now()
	}
	return time.Now()
}

func setData(config *bootstrapv1.CapstanConfig, s metav1.ConditionStatus, reason, message string) {
	conditions.Set(config, metav1.Condition{Type: bootstrapv1.DataSecretAvailableCondition, Status: s, Reason: reason, Message: message})
}

func setToken(config *bootstrapv1.CapstanConfig, s metav1.ConditionStatus, reason, message string) {
	conditions.Set(config, metav1.Condition{Type: bootstrapv1.BootstrapTokenAvailableCondition, Status: s, Reason: reason, Message: message})
}

// setReady mirrors DataSecretAvailable: a machine whose data is there has what it needs from us.
func setReady(config *bootstrapv1.CapstanConfig) {
	conditions.Set(config, *conditions.NewMirrorCondition(config, bootstrapv1.DataSecretAvailableCondition,
		conditions.TargetConditionType(clusterv1.ReadyCondition)))
}
