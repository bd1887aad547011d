package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/cli/diagnosis"
)

func (a *app) deleteCommand() *cobra.Command {
	key := client.ObjectKey{}
	var timeout time.Duration
	var wait bool
	cluster := &cobra.Command{
		Use: "cluster NAME", Short: "Delete a cluster and wait until all of its objects are gone", Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			ctx, cancel := withTimeout(c.Context(), timeout)
			defer cancel()
			m, key, err := a.clusterOf(key.Namespace, args[0])
			if err != nil {
				return err
			}
			return a.deleteCluster(ctx, m, key, wait)
		},
	}
	cluster.ValidArgsFunction = a.completeClusters(&key.Namespace)
	cluster.Flags().StringVarP(&key.Namespace, "namespace", "n", "", "namespace of the cluster (default: that of the context)")
	cluster.Flags().DurationVar(&timeout, "timeout", 10*time.Minute, "time limit; 0 for none")
	cluster.Flags().BoolVar(&wait, "wait", true, "wait until all objects of the cluster are gone")
	return group("delete", "Delete a cluster", cluster)
}

func (a *app) deleteCluster(ctx context.Context, m *management, key client.ObjectKey, wait bool) error {
	cluster, err := m.getCluster(ctx, key)
	if err != nil {
		return err
	}
	if err := client.IgnoreNotFound(m.client.Delete(ctx, cluster)); err != nil {
		return err
	}
	if !wait {
		return nil
	}
	p := a.newProgress()
	defer p.close()
	var last view
	err = m.follow(ctx, key, nil, func(v view) (bool, error) {
		last = v
		p.show(deletionSteps(v))
		return v.cluster == nil, nil
	})
	if errors.Is(err, context.DeadlineExceeded) {
		p.close()
		a.blocked(blockers(last))
		return coded{fmt.Errorf("cluster %s is not deleted yet: %w", key.Name, err), exitTimeout}
	}
	return err
}

// deletionSteps returns the steps of the deletion of a cluster by Cluster API.
func deletionSteps(v view) []step {
	count := map[string]int{}
	for _, o := range v.objects {
		count[o.GetKind()]++
	}
	machines := step{name: "machines", done: count["Machine"] == 0}
	if !machines.done {
		machines.note = fmt.Sprintf("%d left", count["Machine"])
	}
	return []step{machines, {name: "cluster", done: v.cluster == nil}}
}

func (a *app) getCommand() *cobra.Command {
	return group("get", "List clusters, or print a kubeconfig", a.getClustersCommand(), a.getKubeconfigCommand())
}

func (a *app) getClustersCommand() *cobra.Command {
	var namespace string
	c := &cobra.Command{
		Use: "clusters", Aliases: []string{"cluster"}, Short: "List clusters", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			m, err := a.management()
			if err != nil {
				return err
			}
			objects, err := m.all(c.Context(), "cluster", namespace)
			if err != nil {
				return err
			}
			clusters := diagnosis.Typed[clusterv1.Cluster](objects)
			if a.structured() {
				printGaps(a.errOut, m.gaps)
				return errors.Join(a.print(summarize(clusters)), m.noRights())
			}
			err = printClusters(a.out, clusters, time.Now())
			printGaps(a.out, m.gaps)
			return errors.Join(err, m.noRights())
		},
	}
	c.Flags().StringVarP(&namespace, "namespace", "n", "", "namespace (default: all; that of the context for users who cannot list all)")
	return c
}

// summary is a cluster in the output of `capstan get clusters`, also for scripts.
type summary struct {
	Name              string `json:"name"`
	Namespace         string `json:"namespace"`
	Phase             string `json:"phase"`
	Available         bool   `json:"available"`
	Endpoint          string `json:"endpoint,omitempty"`
	ControlPlaneReady int32  `json:"controlPlaneReady"`
	ControlPlanes     int32  `json:"controlPlanes"`
	WorkersReady      int32  `json:"workersReady"`
	Workers           int32  `json:"workers"`
}

func summarize(clusters []clusterv1.Cluster) []summary {
	out := make([]summary, 0, len(clusters))
	for i := range clusters {
		c := &clusters[i]
		s := summary{Name: c.Name, Namespace: c.Namespace, Phase: c.Status.Phase, Available: conditions.IsTrue(c, clusterv1.AvailableCondition)}
		if c.Spec.ControlPlaneEndpoint.IsValid() {
			s.Endpoint = c.Spec.ControlPlaneEndpoint.String()
		}
		if r := c.Status.ControlPlane; r != nil {
			s.ControlPlaneReady, s.ControlPlanes = ptr.Deref(r.ReadyReplicas, 0), ptr.Deref(r.DesiredReplicas, 0)
		}
		if r := c.Status.Workers; r != nil {
			s.WorkersReady, s.Workers = ptr.Deref(r.ReadyReplicas, 0), ptr.Deref(r.DesiredReplicas, 0)
		}
		out = append(out, s)
	}
	return out
}

func printClusters(out io.Writer, clusters []clusterv1.Cluster, now time.Time) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "NAMESPACE\tNAME\tPHASE\tAVAILABLE\tCONTROL PLANE\tWORKERS\tENDPOINT\tAGE")
	for i, s := range summarize(clusters) {
		age := duration.HumanDuration(now.Sub(clusters[i].CreationTimestamp.Time))
		fmt.Fprintf(w, "%s\t%s\t%s\t%v\t%d/%d\t%d/%d\t%s\t%s\n", s.Namespace, s.Name, s.Phase, s.Available,
			s.ControlPlaneReady, s.ControlPlanes, s.WorkersReady, s.Workers, s.Endpoint, age)
	}
	return w.Flush()
}

func (a *app) getKubeconfigCommand() *cobra.Command {
	var managementPlane bool
	key := client.ObjectKey{}
	c := &cobra.Command{
		Use: "kubeconfig NAME | --management", Short: "Print the kubeconfig of a cluster, or of the management plane",
		Args: func(c *cobra.Command, args []string) error {
			if managementPlane {
				return cobra.NoArgs(c, args)
			}
			return cobra.ExactArgs(1)(c, args)
		},
		RunE: func(c *cobra.Command, args []string) error {
			if managementPlane {
				data, err := a.managementKubeconfig()
				if err != nil {
					return err
				}
				return a.printKubeconfig(data)
			}
			m, key, err := a.clusterOf(key.Namespace, args[0])
			if err != nil {
				return err
			}
			data, err := m.kubeconfig(c.Context(), key)
			if err != nil {
				return err
			}
			return a.printKubeconfig(data)
		},
	}
	c.ValidArgsFunction = a.completeClusters(&key.Namespace)
	c.Flags().StringVarP(&key.Namespace, "namespace", "n", "", "namespace of the cluster (default: that of the context)")
	c.Flags().BoolVar(&managementPlane, "management", false, "print the kubeconfig of the management plane")
	return c
}

// kubeconfig returns the kubeconfig of a cluster, from the Secret of its control plane provider.
func (m *management) kubeconfig(ctx context.Context, key client.ObjectKey) ([]byte, error) {
	s := &corev1.Secret{}
	err := m.client.Get(ctx, client.ObjectKey{Namespace: key.Namespace, Name: secret.Name(key.Name, secret.Kubeconfig)}, s)
	if apierrors.IsNotFound(err) {
		if _, err := m.getCluster(ctx, key); err != nil {
			return nil, err
		}
		return nil, coded{fmt.Errorf("cluster %s has no kubeconfig yet: wait until its control plane is initialized", key.Name), exitNotFound}
	}
	if err != nil {
		return nil, err
	}
	data := s.Data[secret.KubeconfigDataName]
	if len(data) == 0 {
		return nil, fmt.Errorf("expected a kubeconfig under the key %s of Secret %s/%s, found none", secret.KubeconfigDataName, s.Namespace, s.Name)
	}
	return data, nil
}

// managementKubeconfig returns the kubeconfig that the other commands use, reduced to its context.
func (a *app) managementKubeconfig() ([]byte, error) {
	loader, from, err := a.clientConfig()
	if err != nil {
		return nil, err
	}
	if _, err := loader.ClientConfig(); err != nil {
		return nil, kubeconfigError(from, err)
	}
	raw, err := loader.RawConfig()
	if err != nil {
		return nil, kubeconfigError(from, err)
	}
	if a.context != "" {
		raw.CurrentContext = a.context
	}
	if err := errors.Join(clientcmdapi.MinifyConfig(&raw), clientcmdapi.FlattenConfig(&raw)); err != nil {
		return nil, err
	}
	return clientcmd.Write(raw)
}

// clusterOf connects to the management cluster and returns the key of one of its clusters.
func (a *app) clusterOf(namespace, name string) (*management, client.ObjectKey, error) {
	namespace, err := a.namespace(namespace)
	if err != nil {
		return nil, client.ObjectKey{}, err
	}
	m, err := a.management()
	return m, client.ObjectKey{Namespace: namespace, Name: name}, err
}

// printObjects prints manifests: one List with -o json, else YAML documents.
func (a *app) printObjects(objects []*unstructured.Unstructured) error {
	if a.output == outputJSON {
		list := unstructured.UnstructuredList{Object: map[string]any{"apiVersion": "v1", "kind": "List"}}
		for _, o := range objects {
			list.Items = append(list.Items, *o)
		}
		return a.print(&list)
	}
	for _, o := range objects {
		data, err := yaml.Marshal(o.Object)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(a.out, "---\n%s", data); err != nil {
			return err
		}
	}
	return nil
}

// printKubeconfig prints a kubeconfig as it is, or as JSON.
func (a *app) printKubeconfig(data []byte) error {
	if a.output == outputJSON {
		document, err := yaml.YAMLToJSON(data)
		if err != nil {
			return err
		}
		return a.print(json.RawMessage(document))
	}
	_, err := a.out.Write(data)
	return err
}
