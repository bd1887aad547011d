package hollow

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-helpers/apimachinery/lease"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/node/cloudconfig"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// leaseDuration is a kubelet's.
const leaseDuration = 40 * time.Second

// Identity is the data that a machine needs to become a Node.
type Identity struct {
	Spec *hostpb.MachineSpec
	// BootstrapData is a cloud-config; empty after its use.
	BootstrapData []byte
	// Dir is the machine's folder, which contains its certificates.
	Dir string
}

// bootstrapCredentials requests the credentials of a kubelet: a certificate that the cluster issues for the bootstrap token.
func bootstrapCredentials(ctx context.Context, m Identity) (*rest.Config, error) {
	kubeconfig := filepath.Join(m.Dir, "kubelet.conf")
	if _, err := os.Stat(kubeconfig); err == nil {
		return loaded(kubeconfig)
	}
	node, ca, err := readBootstrapData(m.BootstrapData)
	if err != nil {
		return nil, err
	}
	caFile, keyFile, certFile := filepath.Join(m.Dir, "ca.crt"), filepath.Join(m.Dir, "kubelet.key"), filepath.Join(m.Dir, "kubelet.crt")
	if err := write(caFile, ca); err != nil {
		return nil, err
	}
	server := "https://" + node.Endpoint
	client, err := kube.NewTokenClient(server, caFile, node.BootstrapToken)
	if err != nil {
		return nil, err
	}
	name := node.NodeName(m.Spec.GetName())
	request := kube.Request{
		Name: "node-csr", Signer: certificatesv1.KubeAPIServerClientKubeletSignerName, KeyFile: keyFile,
		CommonName: nodeconfig.NodeUserPrefix + name, Organization: []string{nodeconfig.NodesGroup},
	}
	if err := kube.EnsureCertificate(ctx, client, request, certFile); err != nil {
		return nil, err
	}
	if err := kube.WriteKubeconfig(kubeconfig, m.Spec.GetCluster(), server, caFile, "kubelet", kube.Credential{CertFile: certFile, KeyFile: keyFile}); err != nil {
		return nil, err
	}
	return loaded(kubeconfig)
}

// loaded reads a kubeconfig and its files once, because client-go would watch them for each machine until the end.
func loaded(kubeconfig string) (*rest.Config, error) {
	config, err := kube.RESTConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	if err := rest.LoadTLSFiles(config); err != nil {
		return nil, err
	}
	config.CAFile, config.CertFile, config.KeyFile = "", "", ""
	return config, nil
}

// readBootstrapData returns the node's configuration and the cluster's CA. Errors never quote the data.
func readBootstrapData(data []byte) (*nodeconfig.NodeConfiguration, []byte, error) {
	config, err := cloudconfig.Parse(data, nil)
	if err != nil {
		return nil, nil, err
	}
	files := map[string][]byte{}
	for _, f := range config.Files {
		files[f.Path] = f.Content
	}
	if files[nodeconfig.Path] == nil {
		return nil, nil, fmt.Errorf("the bootstrap data has no file %s: hollow machines support the bootstrap data of a CapstanConfig only", nodeconfig.Path)
	}
	node, err := nodeconfig.Parse(files[nodeconfig.Path])
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", nodeconfig.Path, err)
	}
	return node, files[filepath.Join(nodeconfig.PKIDir, "ca.crt")], nil
}

// beNode registers the machine's Node and keeps it healthy until the context ends. It retries like a kubelet, because the
// cluster may not be reachable yet.
func (m *machine) beNode(ctx context.Context) {
	err := kube.Retry(ctx, "registering the node", m.node)
	if err != nil && ctx.Err() == nil {
		m.update(func(s *hostpb.MachineStatus) {
			s.Bootstrap, s.BootstrapMessage = hostpb.MachineStatus_BOOTSTRAP_FAILED, err.Error()
		})
	}
}

func (m *machine) node(ctx context.Context) error {
	spec := m.spec()
	dir := m.host.store.dir(spec.GetId())
	data, err := os.ReadFile(filepath.Join(dir, bootstrapFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	config, err := m.host.config.Credentials(ctx, Identity{Spec: spec, BootstrapData: data, Dir: dir})
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	if err := register(ctx, client, nodeOf(spec, data)); err != nil {
		return err
	}
	if m.snapshot().GetStatus().GetBootstrap() != hostpb.MachineStatus_SUCCEEDED {
		m.bootstrapped()
	}
	m.setCluster(client)
	go m.keepPods(ctx, client)
	lease.NewController(clock.RealClock{}, client, spec.GetName(), int32(leaseDuration/time.Second), nil,
		m.host.config.Behaviour.LeaseInterval, spec.GetName(), corev1.NamespaceNodeLease, nil).Run(ctx)
	return nil
}

// register creates the Node, or marks the existing one as healthy.
func register(ctx context.Context, client kubernetes.Interface, node *corev1.Node) error {
	_, err := client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	existing, err := client.CoreV1().Nodes().Get(ctx, node.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if existing.Spec.ProviderID != node.Spec.ProviderID {
		return fmt.Errorf("the Node %s exists with providerID %q, expected %q: delete the Node, or give this machine another name", node.Name, existing.Spec.ProviderID, node.Spec.ProviderID)
	}
	existing.Status = node.Status
	_, err = client.CoreV1().Nodes().UpdateStatus(ctx, existing, metav1.UpdateOptions{})
	return err
}

// nodeOf returns the Node of a machine, as a kubelet would register it.
func nodeOf(spec *hostpb.MachineSpec, bootstrapData []byte) *corev1.Node {
	now := metav1.Now()
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: spec.GetName(), Labels: map[string]string{
			corev1.LabelHostname: spec.GetName(), corev1.LabelOSStable: "linux", corev1.LabelArchStable: runtime.GOARCH,
		}},
		Spec: corev1.NodeSpec{ProviderID: spec.GetProviderId()},
		Status: corev1.NodeStatus{
			NodeInfo: corev1.NodeSystemInfo{
				KubeletVersion: spec.GetKubernetesVersion(), OperatingSystem: "linux", Architecture: runtime.GOARCH,
				ContainerRuntimeVersion: "hollow://", OSImage: "hollow", MachineID: spec.GetId(), SystemUUID: spec.GetId(),
			},
			Addresses: []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: spec.GetName()}},
			Conditions: []corev1.NodeCondition{
				{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", Message: "hollow", LastHeartbeatTime: now, LastTransitionTime: now},
				{Type: corev1.NodeMemoryPressure, Status: corev1.ConditionFalse, Reason: "Hollow", LastHeartbeatTime: now, LastTransitionTime: now},
				{Type: corev1.NodeDiskPressure, Status: corev1.ConditionFalse, Reason: "Hollow", LastHeartbeatTime: now, LastTransitionTime: now},
				{Type: corev1.NodePIDPressure, Status: corev1.ConditionFalse, Reason: "Hollow", LastHeartbeatTime: now, LastTransitionTime: now},
			},
		},
	}
	if node, _, err := readBootstrapData(bootstrapData); err == nil {
		own, _ := node.Node.KubeletLabels()
		for k, v := range own {
			n.Labels[k] = v
		}
		n.Spec.Taints = taints(node.Node.Taints)
	}
	for _, a := range spec.GetAddresses() {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.GetAddress()})
	}
	n.Status.Capacity = corev1.ResourceList{
		corev1.ResourceCPU:              *resource.NewQuantity(max(1, int64(spec.GetCpus())), resource.DecimalSI),
		corev1.ResourceMemory:           *resource.NewQuantity(spec.GetMemoryBytes(), resource.BinarySI),
		corev1.ResourcePods:             *resource.NewQuantity(110, resource.DecimalSI),
		corev1.ResourceEphemeralStorage: *resource.NewQuantity(spec.GetDiskBytes(), resource.BinarySI),
	}
	n.Status.Allocatable = n.Status.Capacity
	return n
}

// keepPods reports that the Node's pods run, and removes the pods that are being deleted. Otherwise a drain of the Node
// would never end.
func (m *machine) keepPods(ctx context.Context, client kubernetes.Interface) {
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", m.spec().GetName()).String()
	}))
	pods := factory.Core().V1().Pods().Informer()
	keep := func(obj any) {
		if err := keepPod(ctx, client, obj.(*corev1.Pod)); err != nil && ctx.Err() == nil {
			m.host.log.Warn("Cannot update a pod of a hollow node", "node", m.spec().GetName(), "error", err)
		}
	}
	if _, err := pods.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: keep, UpdateFunc: func(_, pod any) { keep(pod) }}); err != nil {
		return
	}
	pods.Run(ctx.Done())
}

func keepPod(ctx context.Context, client kubernetes.Interface, pod *corev1.Pod) error {
	pods := client.CoreV1().Pods(pod.Namespace)
	if pod.DeletionTimestamp != nil {
		err := pods.Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0), Preconditions: metav1.NewUIDPreconditions(string(pod.UID))})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return err
	}
	if pod.Status.Phase != corev1.PodPending {
		return nil
	}
	now := metav1.Now()
	running := pod.DeepCopy()
	running.Status.Phase, running.Status.StartTime = corev1.PodRunning, &now
	running.Status.Conditions = append(running.Status.Conditions,
		corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: now},
		corev1.PodCondition{Type: corev1.ContainersReady, Status: corev1.ConditionTrue, LastTransitionTime: now},
		corev1.PodCondition{Type: corev1.PodInitialized, Status: corev1.ConditionTrue, LastTransitionTime: now})
	for _, c := range pod.Spec.Containers {
		running.Status.ContainerStatuses = append(running.Status.ContainerStatuses, corev1.ContainerStatus{
			Name: c.Name, Image: c.Image, Ready: true, Started: ptr.To(true), State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}},
		})
	}
	_, err := pods.UpdateStatus(ctx, running, metav1.UpdateOptions{})
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil // The newer one comes as an event.
	}
	return err
}

// taints parses key=value:Effect and key:Effect.
func taints(given []string) []corev1.Taint {
	var out []corev1.Taint
	for _, t := range given {
		rest, effect, _ := strings.Cut(t, ":")
		key, value, _ := strings.Cut(rest, "=")
		out = append(out, corev1.Taint{Key: key, Value: value, Effect: corev1.TaintEffect(effect)})
	}
	return out
}
