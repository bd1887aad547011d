// Package capstanhost reconciles CapstanHosts: it maintains the connections to hosts and reports their state.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package capstanhost

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/expiry"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/hostselection"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/selection"
	"capstan.dev/capstan/internal/shorten"
)

// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanhosts,verbs=get;list;watch;patch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanhosts/status,verbs=patch
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanhosts/finalizers,verbs=update
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanmachines;capstanclusters,verbs=get;list;watch
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=clusters,verbs=get;list;watch
// +kubebuilder:rbac:groups=cluster.x-k8s.io,resources=machines,verbs=list;delete
// Secrets are patched in the provider's own namespace only, credentials and tokens: config/infrastructure/rbac/host_credentials_role.yaml.
// +kubebuilder:rbac:groups="",resources=secrets;namespaces,verbs=get;list;watch
// +kubebuilder:rbac:groups="";events.k8s.io,resources=events,verbs=create;patch

// Fields of the cache's indexes for the objects on a host.
const (
	// MachineHostIndex of CapstanMachines: spec.hostName, or NoHost.
	MachineHostIndex = "spec.hostName"
	// ClusterHostIndex of CapstanClusters: the hosts that have their load balancers, or had them and are not rid of them.
	ClusterHostIndex = "spec.loadBalancer.hostName"
	// NoHost is the index value of machines that have no host yet. No host can have this name.
	NoHost = "-"
)

// capacityDelay is the time that the free resources of a host wait for their report. A host changes them several times for each new
// machine, and each report is a write. Placement does not use the report.
const capacityDelay = time.Second

// Reconciler keeps the connection to each host and shows the host's state. It writes only when
// something changed.
type Reconciler struct {
	reconciling.Options
	Client client.Client
	Pool   *connections.Pool

	frame    reconciling.Frame
	recorder events.EventRecorder
}

// SetupWithManager adds the reconciler and the indexes of this package.
func (r *Reconciler) SetupWithManager(ctx context.Context, mgr ctrl.Manager) error {
	if err := addIndexes(ctx, mgr); err != nil {
		return err
	}
	secrets, err := addSecrets(mgr)
	if err != nil {
		return err
	}
	r.recorder = reconciling.EventRecorder(mgr, "capstanhost-controller")
	r.frame = reconciling.Frame{
		Client: r.Client, Live: r.LiveClient, Finalizer: infrav1.HostFinalizer,
		Summary: []string{infrav1.HostConnectedCondition},
	}
	return r.Controller(mgr, "CapstanHost").
		For(&infrav1.CapstanHost{}).
		// The last machine or cluster that leaves lets a host that is being deleted go.
		Watches(&infrav1.CapstanMachine{}, handler.EnqueueRequestsFromMapFunc(hostsOf), reconciling.OnlyDeletes).
		Watches(&infrav1.CapstanVolume{}, handler.EnqueueRequestsFromMapFunc(hostsOf), reconciling.OnlyDeletes).
		Watches(&infrav1.CapstanCluster{}, handler.EnqueueRequestsFromMapFunc(hostsOf), predicate.Or(reconciling.OnlyDeletes, hostsChanged)).
		// A namespace that is not admitted any more can let such a host go, too.
		Watches(&corev1.Namespace{}, handler.EnqueueRequestsFromMapFunc(r.deletedOfNamespace), selection.NamespaceChanged()).
		// Credentials that were renewed are used at once.
		WatchesRawSource(secrets).
		WatchesRawSource(r.Pool.Source(func(_ context.Context, e connections.Event) []reconcile.Request {
			if !e.Connection && !e.Claimed {
				return nil
			}
			return request(e.Host)
		})).
		WatchesRawSource(r.Pool.SourceAfter(capacityDelay, func(_ context.Context, e connections.Event) []reconcile.Request {
			if !e.Capacity {
				return nil
			}
			return request(e.Host)
		})).
		Complete(ctx, reconciling.Traced("CapstanHost", r))
}

func addIndexes(ctx context.Context, mgr ctrl.Manager) error {
	return errors.Join(
		mgr.GetFieldIndexer().IndexField(ctx, &infrav1.CapstanMachine{}, MachineHostIndex, func(o client.Object) []string {
			if name := o.(*infrav1.CapstanMachine).Spec.HostName; name != "" {
				return []string{name}
			}
			return []string{NoHost}
		}),
		mgr.GetFieldIndexer().IndexField(ctx, &infrav1.CapstanCluster{}, ClusterHostIndex, func(o client.Object) []string {
			return hostselection.BalancerHosts(o.(*infrav1.CapstanCluster))
		}),
	)
}

// hostsChanged passes the update with which a load balancer is off a host.
var hostsChanged = reconciling.Changed(func(before, after *infrav1.CapstanCluster) bool {
	return !slices.Equal(hostselection.BalancerHosts(before), hostselection.BalancerHosts(after))
})

func hostsOf(_ context.Context, o client.Object) (out []reconcile.Request) {
	switch o := o.(type) {
	case *infrav1.CapstanMachine:
		return request(o.Spec.HostName)
	case *infrav1.CapstanVolume:
		return request(o.Spec.HostName)
	case *infrav1.CapstanCluster:
		for _, name := range hostselection.BalancerHosts(o) {
			out = append(out, request(name)...)
		}
	}
	return out
}

// deletedOfNamespace maps a Namespace to the hosts that are being deleted and select namespaces by label.
func (r *Reconciler) deletedOfNamespace(ctx context.Context, _ client.Object) []reconcile.Request {
	return reconciling.RequestsIf(ctx, r.Client, &infrav1.CapstanHostList{}, func(h *infrav1.CapstanHost) bool {
		return !h.DeletionTimestamp.IsZero() && h.Spec.AllowedNamespaces != nil && h.Spec.AllowedNamespaces.Selector != nil
	})
}

func request(name string) []reconcile.Request {
	if name == "" {
		return nil
	}
	return []reconcile.Request{{NamespacedName: client.ObjectKey{Name: name}}}
}

// Reconcile implements reconcile.Reconciler.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (_ ctrl.Result, reterr error) {
	host := &infrav1.CapstanHost{}
	if err := r.Client.Get(ctx, req.NamespacedName, host); err != nil {
		if apierrors.IsNotFound(err) {
			expiry.Forget(hostKind, "", req.Name)
			r.Pool.Disconnect(req.Name)
		}
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !r.Watches(host) {
		return ctrl.Result{}, nil
	}
	patch, err := r.frame.Begin(ctx, nil, host)
	if err != nil || patch == nil {
		return ctrl.Result{}, err
	}
	defer func() { reterr = errors.Join(reterr, r.frame.End(ctx, patch, host)) }()
	// A host that is being deleted stays connected, so that its machines and load balancers can be removed.
	before := connection(host)
	again, err := r.reconcileConnection(ctx, host)
	r.recordConnection(host, before)
	if !host.DeletionTimestamp.IsZero() {
		return ctrl.Result{RequeueAfter: again}, errors.Join(err, r.reconcileDelete(ctx, host))
	}
	step := nextReboot(host, bootOf(r.Pool.Get(host.Name)))
	draining, errDrain := r.reconcileDrain(ctx, host, step == rebootPrepare)
	rebooting, errReboot := r.reconcileReboot(ctx, host, step, draining)
	if (draining || rebooting) && (again == 0 || again > drainPause) {
		again = drainPause
	}
	return ctrl.Result{RequeueAfter: again}, errors.Join(err, errDrain, errReboot)
}

// reconcileConnection connects to the host and reports its state. It returns the time until the next check of the
// certificates.
func (r *Reconciler) reconcileConnection(ctx context.Context, host *infrav1.CapstanHost) (time.Duration, error) {
	if err := r.ownCredentials(ctx, host); err != nil {
		setConnected(host, metav1.ConditionFalse, infrav1.HostCredentialsInvalidReason, err.Error())
		return 0, err
	}
	conn, err := r.Pool.Connect(ctx, host)
	if err != nil {
		setConnected(host, metav1.ConditionFalse, infrav1.HostCredentialsInvalidReason, err.Error())
		return 0, err
	}
	switch err := conn.ConnectionError(); {
	case err == nil:
		setConnected(host, metav1.ConditionTrue, infrav1.HostConnectedReason, "")
	case errors.Is(err, connections.ErrConnecting):
		setConnected(host, metav1.ConditionUnknown, infrav1.HostConnectingReason, "The first connection attempt is in progress")
	case errors.As(err, &connections.IncompatibleError{}):
		setConnected(host, metav1.ConditionFalse, infrav1.HostIncompatibleVersionReason, err.Error())
	default:
		setConnected(host, metav1.ConditionFalse, infrav1.HostUnreachableReason, unreachable(host, err))
	}
	if info := conn.Info(); info != nil {
		setStatus(&host.Status, info)
	}
	if err := r.reconcileFencing(ctx, host, conn); err != nil {
		return 0, err
	}
	res := r.reconcileCertificates(ctx, host, conn)
	if conn.ConnectionError() != nil {
		return res, nil
	}
	return res, r.reconcileUnknown(ctx, host, conn)
}

// unreachable is the message of a host without a connection.
func unreachable(host *infrav1.CapstanHost, err error) string {
	if host.Dials() {
		return fmt.Sprintf("no connection from the host: %s", err)
	}
	return fmt.Sprintf("cannot reach capstand at %s, check that it runs: %s", host.Spec.Address, err)
}

func setConnected(host *infrav1.CapstanHost, status metav1.ConditionStatus, reason, message string) {
	conditions.Set(host, metav1.Condition{Type: infrav1.HostConnectedCondition, Status: status, Reason: reason, Message: message})
}

func setStatus(s *infrav1.CapstanHostStatus, info *hostpb.HostInfo) {
	cpu := *resource.NewQuantity(int64(info.GetCpus()), resource.DecimalSI)
	s.Capacity = corev1.ResourceList{
		corev1.ResourceCPU:    cpu,
		corev1.ResourceMemory: *resource.NewQuantity(info.GetMemoryBytes(), resource.BinarySI),
	}
	s.Allocatable = corev1.ResourceList{
		corev1.ResourceCPU:    cpu,
		corev1.ResourceMemory: *resource.NewQuantity(max(0, info.GetMemoryBytes()-info.GetAllocatedMemoryBytes()), resource.BinarySI),
	}
	if disk := info.GetDiskBytes(); disk > 0 {
		s.Capacity[corev1.ResourceEphemeralStorage] = *resource.NewQuantity(disk, resource.BinarySI)
		s.Allocatable[corev1.ResourceEphemeralStorage] = *resource.NewQuantity(max(0, disk-info.GetAllocatedDiskBytes()), resource.BinarySI)
	}
	setDevices(s, info)
	s.DiskBackend = infrav1.DiskBackend(info.GetDiskBackend())
	s.LocalVolumeSizes = infrav1.LocalVolumeSizes(info.GetLocalVolumeSizes())
	s.Machines = ptr.To(info.GetMachines())
	s.Versions, s.Images = info.GetKubernetesVersions(), images(info)
	s.ContainerImages = containerImages(info)
	s.NodeInfo = infrav1.NodeInfo{Architecture: info.GetArchitecture(), OperatingSystem: info.GetOperatingSystem()}
	s.System = infrav1.HostSystem{
		CapstandVersion: limited(info.GetCapstandVersion()), KernelVersion: limited(info.GetKernelVersion()), OSImage: limited(info.GetOsImage()),
	}
	if v := info.GetCgroupVersion(); v == 1 || v == 2 {
		s.System.CgroupVersion = ptr.To(v)
	}
	s.BoxID = info.GetBoxId()
	s.OverlayPublicKey = info.GetOverlayPublicKey()
}

// maxImages and maxDigest are limits of the API.
const (
	maxImages = 64
	maxDigest = 71
)

// images returns the images of a host that the API accepts.
func images(info *hostpb.HostInfo) (out []infrav1.HostImage) {
	names := map[string]bool{}
	for _, i := range info.GetMachineImages() {
		name := i.GetName()
		if len(out) == maxImages || names[name] || len(validation.IsDNS1123Subdomain(strings.ReplaceAll(name, "_", "-"))) > 0 || len(name) > validation.DNS1123LabelMaxLength || len(i.GetDigest()) > maxDigest {
			continue
		}
		names[name] = true
		out = append(out, infrav1.HostImage{Name: name, Digest: i.GetDigest(), Problem: limited(i.GetProblem())})
	}
	return out
}

// Limits of the API, and of the names of container images in one status: etcd stores at most 60 KB of a host that reports nonsense.
const (
	maxArchives     = 64
	maxArchiveName  = 255
	maxArchiveNames = 16
	maxImageNames   = 64
	maxImageName    = 256
)

// printable matches names of archives and images: administrators read them on terminals.
var printable = regexp.MustCompile(`^[[:graph:]]+$`)

// containerImages returns the archives of a host that the API accepts.
func containerImages(info *hostpb.HostInfo) (out []infrav1.HostContainerImages) {
	seen, left := map[string]bool{}, maxImageNames
	for _, a := range info.GetContainerArchives() {
		name := a.GetName()
		if len(out) == maxArchives {
			break
		}
		if seen[name] || len(name) > maxArchiveName || !printable.MatchString(name) {
			continue
		}
		seen[name] = true
		archive := infrav1.HostContainerImages{Archive: name, Problem: limited(a.GetProblem())}
		for _, image := range a.GetImages() {
			if len(archive.Names) < min(maxArchiveNames, left) && len(image) <= maxImageName && printable.MatchString(image) {
				archive.Names = append(archive.Names, image)
			}
		}
		left -= len(archive.Names)
		out = append(out, archive)
	}
	return out
}

// limited shortens a text of a host to the longest that the API accepts: one field must not refuse the whole status.
func limited(text string) string { return shorten.To(text, 256) }

// ownCredentials makes the host the owner of its credentials' Secret, so that clusterctl moves both.
func (r *Reconciler) ownCredentials(ctx context.Context, host *infrav1.CapstanHost) error {
	ref := host.Spec.CredentialsRef
	if ref.Name == "" || !host.DeletionTimestamp.IsZero() {
		return nil
	}
	secret := &corev1.Secret{}
	if err := r.LiveClient.Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, secret); err != nil {
		return fmt.Errorf("cannot read the Secret %s/%s with the host's credentials: %w", ref.Namespace, ref.Name, err)
	}
	owner := metav1.OwnerReference{APIVersion: infrav1.GroupVersion.String(), Kind: "CapstanHost", Name: host.Name, UID: host.UID}
	if _, labelled := secret.Labels[infrav1.HostCredentialsLabel]; labelled && util.HasExactOwnerRef(secret.OwnerReferences, owner) {
		return nil
	}
	before := secret.DeepCopy()
	metav1.SetMetaDataLabel(&secret.ObjectMeta, infrav1.HostCredentialsLabel, "")
	secret.OwnerReferences = util.EnsureOwnerRef(secret.OwnerReferences, owner)
	err := r.Client.Patch(ctx, secret, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsForbidden(err) {
		return fmt.Errorf("expected the Secret with the host's credentials in the namespace of the infrastructure provider, found it in %s, where the provider may not make the host its owner: move it, or allow the provider to patch this Secret with a Role: %w", ref.Namespace, err)
	}
	return err
}

// reconcileDelete keeps the host until nothing of this management plane is on it.
func (r *Reconciler) reconcileDelete(ctx context.Context, host *infrav1.CapstanHost) error {
	if !hostselection.Abandoned(host) {
		of := r.residentsOf(ctx, host)
		machines, clusters, err := r.users(ctx, host.Name, of)
		if err != nil {
			setInUse(host, "The objects on the host are unknown: %s. They may belong to another manager: allow this manager to list CapstanMachines and CapstanClusters of all namespaces, and to read Namespaces, as the provider's ClusterRole does. If the host is permanently lost, annotate it with %s",
				err, infrav1.HostAbandonedAnnotation)
			return err
		}
		if machines+clusters > 0 {
			setInUse(host, "The host has %d CapstanMachines and the load balancers of %d CapstanClusters: delete them first. If the host is permanently lost, annotate it with %s",
				machines, clusters, infrav1.HostAbandonedAnnotation)
			return nil
		}
		volumes, err := r.volumes(ctx, host.Name, of)
		if err != nil {
			setInUse(host, "The CapstanVolumes on the host are unknown: %s. Allow this manager to list CapstanVolumes of all namespaces, and to read Namespaces, as the provider's ClusterRole does. If the host is permanently lost, annotate it with %s",
				err, infrav1.HostAbandonedAnnotation)
			return err
		}
		if volumes > 0 {
			setInUse(host, "The host has %d CapstanVolumes, whose data would be lost: delete them first. If the host is permanently lost, annotate it with %s", volumes, infrav1.HostAbandonedAnnotation)
			return nil
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

func setInUse(host *infrav1.CapstanHost, format string, args ...any) {
	conditions.Set(host, metav1.Condition{
		Type: clusterv1.DeletingCondition, Status: metav1.ConditionTrue, Reason: infrav1.HostDeletingInUseReason, Message: fmt.Sprintf(format, args...),
	})
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
