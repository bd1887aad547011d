//go:build linux

package cli

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/utils/ptr"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/doctor"
	"capstan.dev/capstan/internal/embedded"
	"capstan.dev/capstan/templates"
)

// Names and sizes of the objects that quickstart creates.
const (
	demoCluster = "demo"
	demoWorkers = 2
	echoName    = "echo"
	echoImage   = "registry.capstan.dev/echo:v1"
	echoPort    = 8080
	echoPods    = 2
)

func (a *app) quickstartCommand() *cobra.Command {
	var timeout time.Duration
	c := &cobra.Command{
		Use: "quickstart", Short: "Create a management plane, a first cluster and a workload in it", Args: cobra.NoArgs,
		Long: `Check the box, start the management plane, create the cluster demo with 1 control plane machine and 2 workers, run a
workload in it, and send a request to its Service. A second run changes nothing.`,
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, cancel := withTimeout(c.Context(), timeout)
			defer cancel()
			return a.quickstart(ctx)
		},
	}
	c.Flags().DurationVar(&timeout, "timeout", 30*time.Minute, "time limit; 0 for none")
	return c
}

func (a *app) quickstart(ctx context.Context) error {
	start := time.Now()
	a.onlyPlaneOfRoot()
	results, err := a.examine(ctx, false)
	if err != nil {
		return err
	}
	a.title("Check of this box")
	a.printResults(results, true)
	if !doctor.Fit(results) {
		return errUnfit
	}
	a.title("Management plane")
	if _, err := a.up(ctx, embedded.Options{}, 0); err != nil {
		return err
	}
	a.title(fmt.Sprintf("Cluster %s: 1 control plane machine, %d workers", demoCluster, demoWorkers))
	kubeconfig, err := a.demo(ctx)
	if err != nil {
		return err
	}
	a.title(fmt.Sprintf("A workload: %d pods behind a Service", echoPods))
	w, err := a.newWorkload(kubeconfig)
	if err != nil {
		return err
	}
	if err := w.run(ctx, a); err != nil {
		return err
	}
	path := filepath.Join(a.root, demoCluster+".kubeconfig")
	if err := keepKubeconfig(path, kubeconfig); err != nil {
		return err
	}
	a.title(fmt.Sprintf("Done in %.1f s", time.Since(start).Seconds()))
	return w.report(ctx, a, path)
}

// onlyPlaneOfRoot makes each step use the plane of the root folder, as --root does, and no other one that $KUBECONFIG or a flag names.
func (a *app) onlyPlaneOfRoot() { a.rootGiven, a.kubeconfig, a.context = true, "", "" }

func (a *app) title(text string) { fmt.Fprintf(a.out, "\n%s\n", text) }

// demo creates the cluster unless it exists, waits for it, and returns its kubeconfig.
func (a *app) demo(ctx context.Context) ([]byte, error) {
	o := clusterOptions{name: demoCluster, namespace: metav1.NamespaceDefault, controlPlanes: 1, workers: demoWorkers}
	m, err := a.localManagement()
	if err != nil {
		return nil, err
	}
	p := a.newProgress()
	defer p.close()
	if err := a.createDemo(ctx, m, o); err != nil {
		return nil, err
	}
	if err := a.waitCluster(ctx, m, o.key(), p); err != nil {
		return nil, err
	}
	return m.kubeconfig(ctx, o.key())
}

// createDemo creates the cluster, or continues an interrupted creation. It changes nothing if the cluster is complete.
func (a *app) createDemo(ctx context.Context, m *management, o clusterOptions) error {
	cluster, err := m.getCluster(ctx, o.key())
	if err == nil && cluster.DeletionTimestamp.IsZero() && isComplete(cluster) {
		return nil
	}
	exists := err == nil
	if !exists && exitCode(err) != exitNotFound {
		return err
	}
	template, err := o.template(templates.FS, nil)
	if err != nil {
		return err
	}
	objects, hosts, err := a.render(ctx, m, &o, template)
	if err != nil {
		return err
	}
	// The machines of an interrupted creation have their memory already.
	if !exists {
		if err := enoughMemory(o.name, memoryLimits(objects), hosts); err != nil {
			return err
		}
	}
	return m.createCluster(ctx, o, nil, objects)
}

// enoughMemory refuses machines that would wait without end for the memory of the box.
func enoughMemory(cluster string, limits []int64, hosts []infrav1.CapstanHost) error {
	fit, known := fitting(limits, hosts)
	if !known || fit == len(limits) {
		return nil
	}
	var free int64
	for i := range hosts {
		free += hosts[i].Status.Allocatable.Memory().Value()
	}
	return coded{fmt.Errorf("expected %d MiB of free memory for the %d machines of cluster %s, found %d MiB without the memory that is reserved for the box: "+
		"use a box with more memory, delete other clusters, or create smaller machines: `sudo CAPSTAN_CONTROL_PLANE_MEMORY=1Gi CAPSTAN_WORKER_MEMORY=512Mi capstan quickstart`",
		sum(limits)>>20, len(limits), cluster, free>>20), exitUnfit}
}

// keepKubeconfig writes the kubeconfig to the path that report prints.
func keepKubeconfig(path string, data []byte) error {
	if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, data) {
		return nil
	}
	return atomicfile.WriteFile(path, data, 0o600)
}

// workload is the Deployment and the Service in the demo cluster.
type workload struct {
	config *rest.Config
	client kubernetes.Interface
	assets string
}

func (a *app) newWorkload(kubeconfig []byte) (*workload, error) {
	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	assets, err := a.assetsDir()
	return &workload{config: config, client: client, assets: assets.EchoImage()}, err
}

// run creates the workload and shows its progress.
func (w *workload) run(ctx context.Context, a *app) error {
	p := a.newProgress()
	defer p.close()
	steps := []step{{name: "image loaded into the machines"}, {name: "pods available"}}
	deployment, err := w.client.AppsV1().Deployments(metav1.NamespaceDefault).Get(ctx, echoName, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	p.show(steps)
	if err != nil || !available(deployment) {
		if _, err := a.loadImage(ctx, metav1.NamespaceDefault, demoCluster, w.assets); err != nil {
			return err
		}
	}
	steps[0].done = true
	p.show(steps)
	if err := w.ensure(ctx); err != nil {
		return err
	}
	if err := w.waitAvailable(ctx); err != nil {
		return fmt.Errorf("expected %d pods of Deployment %s: %w", echoPods, echoName, err)
	}
	steps[1].done = true
	p.show(steps)
	return nil
}

func available(d *appsv1.Deployment) bool {
	return d.Status.ObservedGeneration >= d.Generation && d.Status.AvailableReplicas >= ptr.Deref(d.Spec.Replicas, 1)
}

// ensure creates the Deployment and the Service unless they exist.
func (w *workload) ensure(ctx context.Context) error {
	labels := map[string]string{"app": echoName}
	meta := metav1.ObjectMeta{Name: echoName, Namespace: metav1.NamespaceDefault, Labels: labels}
	deployment := &appsv1.Deployment{ObjectMeta: meta, Spec: appsv1.DeploymentSpec{
		Replicas: ptr.To[int32](echoPods),
		Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: labels},
			Spec: corev1.PodSpec{
				// The image is in the machines. No registry has it.
				Containers: []corev1.Container{{
					Name: echoName, Image: echoImage, ImagePullPolicy: corev1.PullNever,
					Ports: []corev1.ContainerPort{{ContainerPort: echoPort}},
				}},
				TopologySpreadConstraints: []corev1.TopologySpreadConstraint{{
					MaxSkew: 1, TopologyKey: corev1.LabelHostname, WhenUnsatisfiable: corev1.ScheduleAnyway,
					LabelSelector: &metav1.LabelSelector{MatchLabels: labels},
				}},
			},
		},
	}}
	service := &corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{
		Selector: labels, Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(echoPort)}},
	}}
	if _, err := w.client.CoreV1().Services(meta.Namespace).Create(ctx, service, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	if _, err := w.client.AppsV1().Deployments(meta.Namespace).Create(ctx, deployment, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	return nil
}

// waitAvailable waits until the Deployment is available. A watch without a resource version starts with the current object.
func (w *workload) waitAvailable(ctx context.Context) error {
	for {
		watcher, err := w.client.AppsV1().Deployments(metav1.NamespaceDefault).Watch(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", echoName).String()})
		if err != nil {
			return err
		}
		for event := range watcher.ResultChan() {
			if d, ok := event.Object.(*appsv1.Deployment); ok && available(d) {
				watcher.Stop()
				return nil
			}
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

// report prints the Nodes, the answer of the workload, and the next commands.
func (w *workload) report(ctx context.Context, a *app, kubeconfig string) error {
	nodes, err := w.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	slices.SortFunc(nodes.Items, func(x, y corev1.Node) int { return strings.Compare(x.Name, y.Name) })
	table := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "NODE\tREADY\tVERSION\tADDRESS")
	for _, n := range nodes.Items {
		fmt.Fprintf(table, "%s\t%v\t%s\t%s\n", n.Name, nodeReady(n), n.Status.NodeInfo.KubeletVersion, nodeAddress(n))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	answer, err := w.ask(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(a.out, "\nAnswer of http://%s to a pod, through DNS and Service: %q\n", echoName, answer)
	fmt.Fprintf(a.out, "\nUse the cluster:      export KUBECONFIG=%s\nUse the management:   export KUBECONFIG=%s\n", kubeconfig, a.layout().AdminKubeconfig())
	fmt.Fprintf(a.out, "Create another one:   %[1]s create cluster two --kubeconfig %[2]s\nRemove everything:    %[1]s down\n", a.self(), a.layout().AdminKubeconfig())
	return nil
}

func nodeReady(n corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

func nodeAddress(n corev1.Node) string {
	for _, address := range n.Status.Addresses {
		if address.Type == corev1.NodeInternalIP {
			return address.Address
		}
	}
	return ""
}

// ask sends a request from one of the pods to the Service, by its DNS name.
func (w *workload) ask(ctx context.Context) (string, error) {
	pods, err := w.client.CoreV1().Pods(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{LabelSelector: "app=" + echoName, FieldSelector: "status.phase=Running"})
	if err != nil {
		return "", err
	}
	if len(pods.Items) == 0 {
		return "", fmt.Errorf("expected a running pod of Deployment %s, found none", echoName)
	}
	request := w.client.CoreV1().RESTClient().Post().Resource("pods").Namespace(metav1.NamespaceDefault).Name(pods.Items[0].Name).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{
			Command: []string{"/echo", "get", "-for", "20s", "http://" + echoName}, Stdout: true, Stderr: true,
		}, scheme.ParameterCodec)
	executor, err := remotecommand.NewWebSocketExecutor(w.config, "GET", request.URL().String())
	if err != nil {
		return "", err
	}
	var out, errs bytes.Buffer
	if err := executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: &out, Stderr: &errs}); err != nil {
		return "", fmt.Errorf("expected an answer through Service %s: %w: %s", echoName, err, strings.TrimSpace(errs.String()))
	}
	return strings.TrimSpace(out.String()), nil
}
