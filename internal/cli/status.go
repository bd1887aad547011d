package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/cli/diagnosis"
)

func (a *app) statusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Show the state of the management plane", Args: cobra.NoArgs,
		Long: `Show the state of the management plane of this box: its components, backups, certificates, and updates of machines.
Without a plane on this box, and with --kubeconfig or --context, show the part that the API of a management cluster contains: its providers and
their managers, hosts, clusters, and updates of machines.`,
		RunE: func(c *cobra.Command, _ []string) error {
			if statusHere(a.surroundings(), a.planeHere()) {
				return a.localStatus(c.Context())
			}
			m, err := a.management()
			if err != nil {
				return err
			}
			return a.remoteStatus(c.Context(), m)
		},
	}
}

// statusHere reports whether status shows the plane of this box, of which it knows more than the API. Other than in other
// commands, $KUBECONFIG alone selects no other plane: users of this box often set it to the kubeconfig of this plane.
func statusHere(s surroundings, planeHere bool) bool {
	if planeHere {
		s.plane, s.environment = true, ""
	}
	return choose(s) == fromPlane
}

// provider is an installed provider of Cluster API.
type provider struct {
	Name      string `json:"name"`
	Type      string `json:"type"`
	Version   string `json:"version"`
	Namespace string `json:"namespace"`
}

// managerPod is a Pod of a provider's manager. The managers of an embedded plane are processes.
type managerPod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Phase     string `json:"phase"`
	Ready     bool   `json:"ready"`
	Restarts  int32  `json:"restarts"`
}

// apiStatus is the state of a management cluster as its API shows it. The fields have the names of the status of a plane of this
// box, where both know them.
type apiStatus struct {
	Server            string             `json:"server"`
	KubernetesVersion string             `json:"kubernetesVersion"`
	Providers         []provider         `json:"providers"`
	Managers          []managerPod       `json:"managers"`
	Hosts             []report           `json:"hosts"`
	Clusters          []report           `json:"clusters"`
	Updates           []diagnosis.Update `json:"updates,omitempty"`
	Unreadable        []gap              `json:"unreadable,omitempty"`
}

func (a *app) remoteStatus(ctx context.Context, m *management) error {
	hosts, hostsErr := m.all(ctx, "host", "")
	clusters, clustersErr := m.all(ctx, "cluster", "")
	s := apiStatus{Server: m.config.Host, Hosts: reportsOf(topRows(hosts)), Clusters: reportsOf(topRows(clusters))}
	if err := errors.Join(hostsErr, clustersErr, s.read(ctx, m)); err != nil {
		return err
	}
	if a.structured() {
		return errors.Join(a.print(s), m.noRights())
	}
	now := time.Now()
	w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
	s.print(w)
	for _, rows := range [][][]string{topTable("host", topRows(hosts), now), topTable("cluster", topRows(clusters), now)} {
		fmt.Fprintln(w)
		printTable(w, rows)
	}
	printUpdates(w, s.Updates, now)
	if err := w.Flush(); err != nil {
		return err
	}
	printGaps(a.out, m.gaps)
	return m.noRights()
}

// read completes the status with the version of the API server, providers, managers and updates.
func (s *apiStatus) read(ctx context.Context, m *management) error {
	server, err := discovery.NewDiscoveryClientForConfig(m.config)
	if err != nil {
		return err
	}
	version, err := server.ServerVersion()
	if err != nil {
		return fmt.Errorf("expected the version of the API server %s: %w", s.Server, err)
	}
	s.KubernetesVersion = version.GitVersion
	if s.Providers, err = m.providers(ctx); err != nil {
		return err
	}
	if s.Managers, err = m.managerPods(ctx); err != nil {
		return err
	}
	s.Updates, err = m.updates(ctx)
	s.Unreadable = m.gaps
	return err
}

// providers reads the inventory of clusterctl, which the embedded plane and Cluster API Operator write too.
func (m *management) providers(ctx context.Context) ([]provider, error) {
	objects, err := m.listed(ctx, schema.GroupKind{Group: "clusterctl.cluster.x-k8s.io", Kind: "Provider"}, "")
	out := []provider{}
	for _, o := range objects {
		out = append(out, provider{Name: field(o, "providerName"), Type: field(o, "type"), Version: field(o, "version"), Namespace: o.GetNamespace()})
	}
	return out, err
}

// managerPods reads the Pods with the label that clusterctl gives to all objects of a provider.
func (m *management) managerPods(ctx context.Context) ([]managerPod, error) {
	objects, err := m.listed(ctx, schema.GroupKind{Kind: "Pod"}, "", client.HasLabels{clusterv1.ProviderNameLabel})
	out := []managerPod{}
	for _, pod := range diagnosis.Typed[corev1.Pod](objects) {
		p := managerPod{Namespace: pod.Namespace, Name: pod.Name, Phase: string(pod.Status.Phase)}
		for _, c := range pod.Status.Conditions {
			p.Ready = p.Ready || c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		}
		for _, c := range pod.Status.ContainerStatuses {
			p.Restarts += c.RestartCount
		}
		out = append(out, p)
	}
	return out, err
}

// print writes the parts that have no conditions. It omits empty tables.
func (s *apiStatus) print(w io.Writer) {
	fmt.Fprintf(w, "Server:\t%s\nKubernetes:\t%s\n", s.Server, s.KubernetesVersion)
	if len(s.Providers) > 0 {
		fmt.Fprintln(w, "\nPROVIDER\tTYPE\tVERSION\tNAMESPACE")
	}
	for _, p := range s.Providers {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", p.Name, strings.TrimSuffix(p.Type, "Provider"), p.Version, p.Namespace)
	}
	if len(s.Managers) > 0 {
		fmt.Fprintln(w, "\nMANAGER\tNAMESPACE\tPHASE\tREADY\tRESTARTS")
	}
	for _, p := range s.Managers {
		fmt.Fprintf(w, "%s\t%s\t%s\t%v\t%d\n", p.Name, p.Namespace, p.Phase, p.Ready, p.Restarts)
	}
}
