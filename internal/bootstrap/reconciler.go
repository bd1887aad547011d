// Package bootstrap is the bootstrap provider: it creates the bootstrap data of machines from their CapstanConfigs
// (BC-01 to BC-06), and renews and deletes the bootstrap tokens of workers.
//
// Layer: reconciler. Allowed imports: api, library, contract.
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
	"sigs.k8s.io/cluster-api/controllers/external"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/render"
	"capstan.dev/capstan/internal/kubeconfig"
	"capstan.dev/capstan/internal/reconciling"
)

// missingSecretRetry is the interval of attempts to read a missing Secret that the user references. Such Secrets need
// no label. They are therefore not in the cache, and their creation is no event.
const missingSecretRetry = 10 * time.Second

// Reconciler creates the bootstrap data of machines.
type Reconciler struct {
	reconciling.Options
	// Client writes all objects, and reads all but Secrets from the cache.
	Client client.Client

	// Now is the clock; time.Now when nil.
	Now func() time.Time

	tracker  external.ObjectTracker
	recorder events.EventRecorder
	wrote    func(reconciling.Object, string) // see reconciling.Frame
}

// scope contains the objects of one reconciliation.
type scope struct {
	config  *bootstrapv1.CapstanConfig
	owner   *owner
	cluster *clusterv1.Cluster
	// controlPlane of the cluster, if it is a CapstanControlPlane.
	controlPlane *controlplanev1.CapstanControlPlane
	// data is the bootstrap data; nil before it exists.
	data []byte
}

// +kubebuilder:rbac:groups=bootstrap.capstan.dev,resources=capstanconfigs,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=bootstrap.capstan.dev,resources=capstanconfigs/status,verbs=patch
// +kubebuilder:rbac:groups=bootstrap.capstan.dev,resources=capstanconfigs/finalizers,verbs=update
// +kubebuilder:rbac:groups=controlplane.capstan.dev,resources=capstancontrolplanes,verbs=get;list;watch
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=clusters;machines;machinepools,verbs=get;list;watch
// +kubebuilder:rbac:groups="",resources=secrets,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups="",resources=configmaps,verbs=get
// +kubebuilder:rbac:groups="";events.k8s.io,resources=events,verbs=create;patch

// Reconcile implements reconcile.Reconciler. It follows the contract's list: owner, Cluster, pause, data secret, status, one patch (BC-04).
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (_ ctrl.Result, reterr error) {
	config := &bootstrapv1.CapstanConfig{}
	if err := r.Client.Get(ctx, req.NamespacedName, config); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !config.DeletionTimestamp.IsZero() || !r.Watches(config) {
		return ctrl.Result{}, nil // The data secret is deleted with its owner. A remaining token expires.
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
	return r.reconcileNormal(ctx, s)
}

// frame returns the frame of a reconcile. A CapstanConfig has no finalizer: its data secret has an owner reference, and
// a token expires.
func (r *Reconciler) frame() *reconciling.Frame {
	return &reconciling.Frame{Client: r.Client, Live: r.LiveClient, Wrote: r.wrote}
}

func (r *Reconciler) reconcileNormal(ctx context.Context, s *scope) (ctrl.Result, error) {
	result, err := r.reconcileData(ctx, s)
	setReady(s.config)
	update, updateErr := r.reconcileUpdate(ctx, s)
	result, errs := util.LowestNonZeroResult(result, update), []error{err, updateErr}
	if s.data != nil { // Machines join with existing data, also while new data or an update waits.
		errs = append(errs, r.dropFormerData(ctx, s))
		token, err := r.reconcileToken(ctx, s)
		result, errs = util.LowestNonZeroResult(result, token), append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return ctrl.Result{}, err
	}
	return result, nil
}

// scope reads the objects that a config belongs to. It is nil as long as one of them does not exist.
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
	// The watch starts on first use, because the control plane provider may not be installed.
	controlPlane := &controlplanev1.CapstanControlPlane{}
	controlPlane.SetGroupVersionKind(controlplanev1.GroupVersion.WithKind(controlplanev1.ControlPlaneKind))
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

// reconcileData keeps an existing data secret, or creates it when all its inputs exist (BC-02, BC-03).
func (r *Reconciler) reconcileData(ctx context.Context, s *scope) (ctrl.Result, error) {
	data, err := r.dataSecret(ctx, s)
	used := errors.Is(err, errUsed)
	if data == nil && !used {
		var formerErr error
		s.data, formerErr = r.formerData(ctx, s)
		reconciling.SetCondition(s.config, bootstrapv1.DataSecretAvailableCondition, metav1.ConditionFalse, reasonOf(err), "%s", errors.Join(err, formerErr))
		return retry(err, formerErr)
	}
	s.data = data
	s.config.Status.DataSecretName = dataSecretName(s)
	s.config.Status.Initialization.DataSecretCreated = ptr.To(true)
	if used {
		reconciling.SetCondition(s.config, bootstrapv1.DataSecretAvailableCondition, metav1.ConditionTrue, bootstrapv1.DataSecretUsedReason,
			"The Secret %s was deleted after the machine had used it and is not created again", dataSecretName(s))
		return ctrl.Result{}, nil
	}
	message := ""
	if err != nil {
		message = err.Error() // The data is available, with former certificate authorities.
	}
	reconciling.SetCondition(s.config, bootstrapv1.DataSecretAvailableCondition, metav1.ConditionTrue, bootstrapv1.DataSecretAvailableReason, "%s", message)
	return retry(err)
}

// errUsed means that the data Secret was deleted and the machine no longer needs it.
var errUsed = errors.New("the bootstrap data was used")

// dataSecretName returns the name of the data secret. It depends only on the config, and for a pool also on its
// MachinePool (BC-02).
func dataSecretName(s *scope) string {
	if s.owner.pool != nil {
		return poolSecretName(s.config, s.owner.version)
	}
	return s.config.Name
}

// dataSecret returns the existing bootstrap data, or creates it. Existing data does not follow changes of the spec,
// because the machine may have used it (BC-04, ALL-17). Deleted data is created again only before the machine has
// started. Data with an error is available, and has former certificate authorities.
func (r *Reconciler) dataSecret(ctx context.Context, s *scope) ([]byte, error) {
	key := client.ObjectKey{Namespace: s.config.Namespace, Name: dataSecretName(s)}
	existing := &corev1.Secret{}
	err := r.SecretCachingClient.Get(ctx, key, existing)
	if apierrors.IsNotFound(err) && s.owner.started {
		// The cache contains only Secrets with the cluster's label. A backup tool may restore a Secret without it.
		if err = r.Client.Get(ctx, key, existing); apierrors.IsNotFound(err) {
			return nil, errUsed
		}
	}
	if apierrors.IsNotFound(err) {
		return r.createDataSecret(ctx, s, key)
	}
	if err != nil {
		return nil, err
	}
	return r.adopt(ctx, s, existing)
}

// createDataSecret creates the data from the current specification. The machine has not started. If there was a Secret before, an event
// reports that it is created again.
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
		// Only the key `value`, as the contract requires. The only format is cloud-config.
		Data: map[string][]byte{secret.KubeconfigDataName: data},
	}
	if etcd := namedEtcdCertificates(s.config.Spec.Cluster, in.Certificates); etcd != "" {
		created.Annotations[bootstrapv1.EtcdCertificatesAnnotation] = etcd
	}
	err = r.Client.Create(ctx, created)
	if apierrors.IsAlreadyExists(err) {
		// The cache was stale. The stored Secret is used.
		if err := r.Client.Get(ctx, key, created); err != nil {
			return nil, err
		}
		return r.adopt(ctx, s, created)
	}
	if err != nil {
		return nil, err
	}
	ctrl.LoggerFrom(ctx).Info("Created the bootstrap data", "Secret", klog.KObj(created), "version", in.KubernetesVersion, "tokenID", tokenID(in.Token))
	if s.config.Status.DataSecretName == key.Name && r.recorder != nil {
		r.recorder.Eventf(s.config, nil, corev1.EventTypeWarning, "DataSecretRecreated", "Create",
			"Created the deleted Secret %s again, from the current specification", key.Name)
	}
	return data, nil
}

// adopt uses an existing secret, including one that a backup restored without its owner reference or its label. The caches that search
// bootstrap data for tokens contain only Secrets with the label (BC-02).
func (r *Reconciler) adopt(ctx context.Context, s *scope, existing *corev1.Secret) ([]byte, error) {
	data := existing.Data[secret.KubeconfigDataName]
	if existing.Type != clusterv1.ClusterSecretType || len(data) == 0 {
		return nil, &notYet{reason: bootstrapv1.InvalidConfigReason, unseen: true, message: fmt.Sprintf(
			"the Secret %s has the name that the bootstrap data needs, but its type is %q and this provider did not create it: delete or rename it", existing.Name, existing.Type)}
	}
	ref, controller := controllerRef(s.config), metav1.GetControllerOf(existing)
	if controller != nil && !isController(existing, s.config) {
		return nil, &notYet{reason: bootstrapv1.InvalidConfigReason, unseen: true, message: fmt.Sprintf(
			"the Secret %s has the name that the bootstrap data needs, but it belongs to %s %s", existing.Name, controller.Kind, controller.Name)}
	}
	if !util.HasExactOwnerRef(existing.OwnerReferences, ref) || existing.Labels[clusterv1.ClusterNameLabel] != s.cluster.Name {
		err := reconciling.Change(ctx, r.Client, existing, func() {
			existing.OwnerReferences = util.EnsureOwnerRef(slices.Clone(existing.OwnerReferences), ref)
			metav1.SetMetaDataLabel(&existing.ObjectMeta, clusterv1.ClusterNameLabel, s.cluster.Name)
		})
		if err != nil {
			return nil, err
		}
	}
	return r.refreshAuthorities(ctx, s, existing)
}

// isController reports whether the config is the controller of an object. It compares group, kind and name, because a
// reference can have an older version, or the UID from before a restore.
func isController(obj metav1.Object, config *bootstrapv1.CapstanConfig) bool {
	return util.IsControlledBy(obj, config, bootstrapv1.GroupVersion.WithKind(bootstrapv1.ConfigKind).GroupKind())
}

func controllerRef(config *bootstrapv1.CapstanConfig) metav1.OwnerReference {
	return *metav1.NewControllerRef(config, bootstrapv1.GroupVersion.WithKind(bootstrapv1.ConfigKind))
}

// reconcileToken keeps the token of the bootstrap data valid in the workload cluster until the machine has joined, and
// then removes it. It decodes the data, which can have a megabyte, only if there is a token to care for.
func (r *Reconciler) reconcileToken(ctx context.Context, s *scope) (ctrl.Result, error) {
	if hasNoToken(s.config) {
		return ctrl.Result{}, nil
	}
	needed := !s.owner.joined && !s.owner.deleting
	if !needed && tokenRemoved(s.config) {
		setTokenRemoved(s.config) // for a new generation
		return ctrl.Result{}, nil
	}
	token, err := render.Token(s.data)
	if err != nil || token == "" {
		return ctrl.Result{}, err
	}
	if !needed {
		return ctrl.Result{}, r.dropToken(ctx, s, token)
	}
	workload, err := r.workloadClient(ctx, s)
	if _, refused := errors.AsType[*kubeconfig.RefusedError](err); refused {
		reconciling.SetCondition(s.config, bootstrapv1.BootstrapTokenAvailableCondition, metav1.ConditionFalse, bootstrapv1.BootstrapTokenWaitingReason, "%s", err)
		return ctrl.Result{}, nil // No requeue: a change of the Secret is an event.
	}
	if err != nil || workload == nil {
		reconciling.SetCondition(s.config, bootstrapv1.BootstrapTokenAvailableCondition, metav1.ConditionFalse, bootstrapv1.BootstrapTokenWaitingReason, "the workload cluster is not reachable yet")
		return ctrl.Result{}, err
	}
	again, err := r.ensureToken(ctx, s, workload, token)
	if err != nil {
		reconciling.SetCondition(s.config, bootstrapv1.BootstrapTokenAvailableCondition, metav1.ConditionFalse, bootstrapv1.BootstrapTokenWaitingReason, "%s", err)
		return ctrl.Result{}, err
	}
	reconciling.SetCondition(s.config, bootstrapv1.BootstrapTokenAvailableCondition, metav1.ConditionTrue, bootstrapv1.BootstrapTokenAvailableReason, "")
	// A token expires by time, without an event.
	return ctrl.Result{RequeueAfter: again}, nil
}

// ensureToken writes or rotates the token if that is due, and returns the time until the next check. A rotation changes
// the data Secret, which is an event.
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
		return again, putToken(ctx, s, workload, token, existing, r.now().Add(ttl))
	default:
		return again, nil
	}
}

// dropToken removes the token once. The condition, also with the status False, records that a token may exist: the last renewal may
// have failed. Without the condition, the token expires by itself.
func (r *Reconciler) dropToken(ctx context.Context, s *scope, token string) error {
	if !conditions.Has(s.config, bootstrapv1.BootstrapTokenAvailableCondition) {
		setTokenRemoved(s.config)
		return nil
	}
	workload, err := r.workloadClient(ctx, s)
	if _, refused := errors.AsType[*kubeconfig.RefusedError](err); refused {
		return nil // No requeue: a change of the Secret is an event.
	}
	if err != nil || workload == nil {
		return err
	}
	if err := removeToken(ctx, workload, token, s.config); err != nil {
		return err
	}
	setTokenRemoved(s.config)
	return nil
}

func (r *Reconciler) now() time.Time {
	if r.Now != nil {
		return r.Now()
	}
	return time.Now()
}

// setReady copies DataSecretAvailable to Ready: a machine with data needs nothing more from this provider.
func setReady(config *bootstrapv1.CapstanConfig) {
	conditions.Set(config, *conditions.NewMirrorCondition(config, bootstrapv1.DataSecretAvailableCondition,
		conditions.TargetConditionType(clusterv1.ReadyCondition)))
}
