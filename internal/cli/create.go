package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/mod/semver"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/validation"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/cmd/clusterctl/client/yamlprocessor"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/manifest"
	"capstan.dev/capstan/templates"
)

// clusterOptions are the parameters of a new cluster.
type clusterOptions struct {
	name, namespace   string
	kubernetesVersion string
	controlPlanes     int
	workers           int
	flavor, from      string
}

func (a *app) createCommand() *cobra.Command {
	return group("create", "Create a cluster", a.createClusterCommand())
}

func (a *app) createClusterCommand() *cobra.Command {
	o := clusterOptions{}
	var dryRun, wait bool
	var timeout time.Duration
	c := &cobra.Command{
		Use: "cluster NAME", Short: "Create a cluster and wait until it is available", Args: cobra.ExactArgs(1),
		Long: `Create a cluster from a template and wait until it is available.

Variables of the template without a flag come from the environment. If the cluster is not complete within --timeout,
the command prints the problems and exits with code 3. The cluster stays, and its creation continues.`,
		RunE: func(c *cobra.Command, args []string) error {
			o.name = args[0]
			ctx, cancel := withTimeout(c.Context(), timeout)
			defer cancel()
			return a.createCluster(ctx, o, dryRun, wait)
		},
	}
	f := c.Flags()
	f.StringVarP(&o.namespace, "namespace", "n", "", "namespace of the cluster's objects; created if missing (default: that of the context)")
	f.StringVar(&o.kubernetesVersion, "kubernetes-version", "", "Kubernetes version (default: the newest that a host can run)")
	f.IntVar(&o.controlPlanes, "control-plane-machines", unchanged, "number of control plane machines; must be odd (default: $CONTROL_PLANE_MACHINE_COUNT, else that of the template: 3 with --flavor ha, else 1)")
	f.IntVar(&o.workers, "workers", unchanged, "number of worker machines (default: $WORKER_MACHINE_COUNT, else 1; with --flavor or --from else that of the template)")
	f.StringVar(&o.flavor, "flavor", "", "another template of Capstan: "+strings.Join(flavors(templates.FS), ", "))
	f.StringVar(&o.from, "from", "", "template file; - for standard input")
	f.BoolVar(&dryRun, "dry-run", false, "print the objects without creating them")
	f.BoolVar(&wait, "wait", true, "wait until the cluster is available")
	f.DurationVar(&timeout, "timeout", 10*time.Minute, "time limit; 0 for none")
	c.MarkFlagsMutuallyExclusive("flavor", "from")
	_ = c.RegisterFlagCompletionFunc("flavor", cobra.FixedCompletions(flavors(templates.FS), cobra.ShellCompDirectiveNoFileComp))
	a.completeVersionFlag(c)
	return c
}

func (a *app) createCluster(ctx context.Context, o clusterOptions, dryRun, wait bool) (err error) {
	if o.namespace, err = a.namespace(o.namespace); err != nil {
		return err
	}
	if err := o.check(); err != nil {
		return err
	}
	template, err := o.template(templates.FS, os.Stdin)
	if err != nil {
		return err
	}
	m, err := a.managementUnlessDry(dryRun && o.kubernetesVersion != "")
	if err != nil {
		return err
	}
	objects, hosts, err := a.render(ctx, m, &o, template)
	if err != nil {
		return err
	}
	a.warnOfMemory(memoryLimits(objects), false, hosts)
	class, err := o.class(templates.FS, objects)
	if err != nil {
		return err
	}
	if dryRun {
		return a.printObjects(slices.Concat(class, objects))
	}
	if err := m.createCluster(ctx, o, class, objects); err != nil {
		return err
	}
	if wait {
		if err := a.waitCluster(ctx, m, o.key(), a.newProgress()); err != nil {
			return err
		}
	}
	switch {
	case a.structured():
		return a.print(map[string]any{"name": o.name, "namespace": o.namespace})
	case wait:
		fmt.Fprintf(a.out, "\nCluster %[2]s is ready: (umask 077 && %[1]s get kubeconfig %[2]s%[3]s >%[2]s.kubeconfig)\n", a.self(), o.name, o.namespaceFlag())
	default:
		fmt.Fprintf(a.out, "Cluster %[2]s was created. Its progress: %[1]s describe cluster %[2]s%[3]s\n", a.self(), o.name, o.namespaceFlag())
	}
	return nil
}

func (o clusterOptions) key() client.ObjectKey {
	return client.ObjectKey{Namespace: o.namespace, Name: o.name}
}

// namespaceFlag returns the flag that other commands need to find the cluster; "" for the default namespace.
func (o clusterOptions) namespaceFlag() string {
	if o.namespace == metav1.NamespaceDefault {
		return ""
	}
	return " -n " + o.namespace
}

// managementUnlessDry connects to the management cluster. A dry run with a Kubernetes version needs none, and gets nil.
func (a *app) managementUnlessDry(dry bool) (*management, error) {
	if dry {
		return nil, nil
	}
	return a.management()
}

// render returns the objects of a cluster from a template, and the hosts of the management cluster, if there is one. It completes the options.
func (a *app) render(ctx context.Context, m *management, o *clusterOptions, template []byte) (objects []*unstructured.Unstructured, hosts []infrav1.CapstanHost, err error) {
	if m != nil {
		if hosts, err = a.setVersion(ctx, m, o); err != nil {
			return nil, nil, err
		}
	}
	objects, err = o.process(template, os.LookupEnv)
	return objects, hosts, err
}

// setVersion sets the Kubernetes version, or checks the one that the command line sets, with the versions of the hosts. It returns the hosts.
func (a *app) setVersion(ctx context.Context, m *management, o *clusterOptions) ([]infrav1.CapstanHost, error) {
	list := m.hosts
	if o.kubernetesVersion == "" {
		list = func(ctx context.Context) ([]infrav1.CapstanHost, error) {
			return m.hostsWithVersions(ctx, func() { a.step("Waiting for a host to report its Kubernetes versions") })
		}
	}
	hosts, err := list(ctx)
	if err != nil {
		return nil, err
	}
	return hosts, o.chooseVersion(hosts)
}

// check checks the options that the command line sets.
func (o *clusterOptions) check() error {
	if problems := validation.IsDNS1123Label(o.name); len(problems) > 0 {
		return coded{fmt.Errorf("expected a cluster name of lower case letters, digits and dashes, found %q: %s", o.name, problems[0]), exitUsage}
	}
	if problems := validation.IsDNS1123Label(o.namespace); len(problems) > 0 {
		return coded{fmt.Errorf("expected a namespace of lower case letters, digits and dashes, found %q: %s", o.namespace, problems[0]), exitUsage}
	}
	if err := checkControlPlanes(o.controlPlanes); err != nil {
		return err
	}
	if o.kubernetesVersion == "" {
		return nil
	}
	var err error
	o.kubernetesVersion, err = parseVersion(o.kubernetesVersion)
	return err
}

// parseVersion returns a full Kubernetes version with the leading v.
func parseVersion(text string) (string, error) {
	v := "v" + strings.TrimPrefix(text, "v")
	if !semver.IsValid(v) || strings.Count(v, ".") < 2 {
		return "", coded{fmt.Errorf("expected a Kubernetes version such as v1.36.3, found %q", text), exitUsage}
	}
	return v, nil
}

// chooseVersion sets the newest version of all hosts as default. It refuses a version that no host can run, unless a host
// has not reported its versions yet.
func (o *clusterOptions) chooseVersion(hosts []infrav1.CapstanHost) error {
	versions, complete := versionsOf(hosts)
	if o.kubernetesVersion == "" {
		if len(versions) == 0 {
			return coded{errors.New("expected a host that reports its Kubernetes versions, found none: look at `kubectl get capstanhosts`, or set --kubernetes-version"), exitFailed}
		}
		o.kubernetesVersion = versions[len(versions)-1]
		return nil
	}
	if complete && !slices.Contains(versions, o.kubernetesVersion) {
		return coded{fmt.Errorf("expected Kubernetes %s, found %s on the hosts: choose one of these, or install the other one on a host", o.kubernetesVersion, cmp.Or(strings.Join(versions, ", "), "none")), exitUsage}
	}
	return nil
}

// versionsOf lists the Kubernetes versions of all hosts, the oldest first. complete: each host has reported its versions.
func versionsOf(hosts []infrav1.CapstanHost) (versions []string, complete bool) {
	complete = len(hosts) > 0
	for _, h := range hosts {
		complete = complete && len(h.Status.Versions) > 0
		versions = append(versions, h.Status.Versions...)
	}
	slices.SortFunc(versions, semver.Compare)
	return slices.Compact(versions), complete
}

// flavors are the names of the templates besides the default one.
func flavors(shipped fs.FS) (names []string) {
	files, _ := fs.Glob(shipped, "cluster-template-*.yaml") // the pattern is valid
	for _, file := range files {
		names = append(names, strings.TrimSuffix(strings.TrimPrefix(file, "cluster-template-"), ".yaml"))
	}
	return names
}

// template returns the content of the template.
func (o *clusterOptions) template(shipped fs.FS, stdin io.Reader) ([]byte, error) {
	switch o.from {
	case "":
		name := yamlprocessor.NewSimpleProcessor().GetTemplateName("", o.flavor)
		data, err := fs.ReadFile(shipped, name)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, coded{fmt.Errorf("expected one of the flavors %s, found %q", strings.Join(flavors(shipped), ", "), o.flavor), exitUsage}
		}
		return data, err
	case "-":
		return io.ReadAll(stdin)
	}
	data, err := os.ReadFile(o.from)
	if err != nil {
		return nil, missingFile(fmt.Errorf("expected a template: %w", err))
	}
	return data, nil
}

// process replaces the variables of a template as `clusterctl generate cluster` does. A number of machines that neither the command line
// nor the environment sets is the default of the template, or 1.
func (o *clusterOptions) process(template []byte, environment func(string) (string, bool)) ([]*unstructured.Unstructured, error) {
	values := map[string]string{"CLUSTER_NAME": o.name, "NAMESPACE": o.namespace, "KUBERNETES_VERSION": o.kubernetesVersion}
	counts := map[string]int{controlPlanesVariable: o.controlPlanes, "WORKER_MACHINE_COUNT": o.workers}
	processor := yamlprocessor.NewSimpleProcessor()
	defaults, err := processor.GetVariableMap(template)
	if err != nil {
		return nil, coded{fmt.Errorf("expected a template with variables such as ${CLUSTER_NAME}: %w", err), exitUsage}
	}
	if err := o.checkEnvironment(defaults, environment); err != nil {
		return nil, err
	}
	if o.flavor == "" && o.from == "" {
		clear(defaults) // On a small box, one worker fits.
	}
	data, err := processor.Process(template, func(name string) (string, error) {
		count, counted := counts[name]
		if counted && count != unchanged {
			return strconv.Itoa(count), nil
		}
		if value, ok := values[name]; ok {
			return value, nil
		}
		if value, ok := environment(name); ok {
			return value, nil
		}
		if counted && defaults[name] == nil {
			return "1", nil
		}
		return "", fmt.Errorf("%s is not set", name)
	})
	if err != nil {
		return nil, coded{fmt.Errorf("expected a value for each variable of the template: %w; set the missing ones in the environment", err), exitUsage}
	}
	return o.parse(data)
}

// controlPlanesVariable is the variable of a template for the number of control plane machines.
const controlPlanesVariable = "CONTROL_PLANE_MACHINE_COUNT"

// checkEnvironment checks the number of control plane machines if it comes from the environment.
func (o *clusterOptions) checkEnvironment(variables map[string]*string, environment func(string) (string, bool)) error {
	_, used := variables[controlPlanesVariable]
	value, set := environment(controlPlanesVariable)
	if !used || !set || o.controlPlanes != unchanged {
		return nil
	}
	n, err := strconv.Atoi(value)
	if err != nil {
		return coded{fmt.Errorf("expected a number in $%s, found %q", controlPlanesVariable, value), exitUsage}
	}
	if err := checkControlPlanes(n); err != nil {
		return fmt.Errorf("$%s: %w", controlPlanesVariable, err)
	}
	return nil
}

// incompleteAnnotation is on a Cluster until all of its objects are created.
const incompleteAnnotation = "capstan.dev/incomplete"

// parse returns the objects of a template. Objects without a namespace get the cluster's. Objects that the Cluster refers
// to come before it. Objects that refer to the Cluster come after it: Cluster API looks for the Cluster at once, and next
// after a second.
func (o *clusterOptions) parse(data []byte) ([]*unstructured.Unstructured, error) {
	all, err := manifest.Parse(data)
	if err != nil {
		return nil, fmt.Errorf("expected a template of YAML objects: %w", err)
	}
	var objects, clusters, workers []*unstructured.Unstructured
	for _, u := range all {
		if u.GetNamespace() == "" {
			u.SetNamespace(o.namespace)
		}
		switch gvk := u.GroupVersionKind(); {
		case gvk.Group == clusterv1.GroupVersion.Group && gvk.Kind == "Cluster" && u.GetName() == o.name:
			clusters = append(clusters, u)
		case gvk.Group == clusterv1.GroupVersion.Group && namesCluster(u):
			workers = append(workers, u)
		default:
			objects = append(objects, u)
		}
	}
	if len(clusters) != 1 {
		return nil, fmt.Errorf("expected a template with one Cluster named %s, found %d", o.name, len(clusters))
	}
	return slices.Concat(objects, clusters, workers), nil
}

// namesCluster reports whether an object of Cluster API refers to its Cluster.
func namesCluster(u *unstructured.Unstructured) bool {
	_, found, _ := unstructured.NestedString(u.Object, "spec", "clusterName")
	return found
}

// class returns the ClusterClass of the Cluster and its templates, if Capstan contains this class; else nil. The class is
// the last object, so that all of its templates exist when it exists.
func (o *clusterOptions) class(shipped fs.FS, objects []*unstructured.Unstructured) ([]*unstructured.Unstructured, error) {
	i := slices.IndexFunc(objects, func(u *unstructured.Unstructured) bool { return u.GetKind() == "Cluster" && u.GetName() == o.name })
	name, _, _ := unstructured.NestedString(objects[i].Object, "spec", "topology", "classRef", "name")
	namespace, _, _ := unstructured.NestedString(objects[i].Object, "spec", "topology", "classRef", "namespace")
	data, err := fs.ReadFile(shipped, "clusterclass-"+name+".yaml")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // no class, or a class of the user
	}
	if err != nil {
		return nil, err
	}
	class, err := manifest.Parse(data)
	for _, u := range class {
		u.SetNamespace(cmp.Or(namespace, o.namespace))
	}
	slices.SortStableFunc(class, func(a, b *unstructured.Unstructured) int { return isClass(a) - isClass(b) })
	return class, err
}

func isClass(u *unstructured.Unstructured) int {
	if u.GetKind() == "ClusterClass" {
		return 1
	}
	return 0
}

// createClass creates a ClusterClass that does not exist. It never changes an existing one, which the user may have edited.
func (m *management) createClass(ctx context.Context, class []*unstructured.Unstructured) error {
	if len(class) == 0 {
		return nil
	}
	key := client.ObjectKeyFromObject(class[len(class)-1])
	if err := m.client.Get(ctx, key, &clusterv1.ClusterClass{}); !apierrors.IsNotFound(err) {
		return err
	}
	for _, u := range class {
		if err := m.apply(ctx, u); err != nil {
			return err
		}
	}
	return nil
}

// createCluster creates the objects, and the class if it does not exist. An annotation is on the Cluster until all objects
// exist, so that an interrupted command can be repeated.
func (m *management) createCluster(ctx context.Context, o clusterOptions, class, objects []*unstructured.Unstructured) error {
	if cluster, err := m.getCluster(ctx, o.key()); err == nil && !cluster.DeletionTimestamp.IsZero() {
		return fmt.Errorf("expected a new cluster %[1]s, found one in namespace %[2]s that is being deleted: wait until `capstan get clusters` no longer lists it, and run the command again", o.name, o.namespace)
	} else if err == nil && isComplete(cluster) {
		return fmt.Errorf("cluster %s already exists in namespace %s: change it with kubectl, or choose another name", o.name, o.namespace)
	} else if err != nil && exitCode(err) != exitNotFound {
		return err
	}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: o.namespace}}
	// A user without the right to create namespaces works in an existing one. Without it, the next request fails.
	if err := m.client.Create(ctx, namespace); err != nil && !apierrors.IsAlreadyExists(err) && !apierrors.IsForbidden(err) {
		return err
	}
	if err := m.createClass(ctx, class); err != nil {
		return err
	}
	var cluster *unstructured.Unstructured
	for _, u := range objects {
		if u.GetKind() == "Cluster" {
			cluster = u
			// Cluster API would need a reconciliation for the finalizer alone, and it reconciles once a second.
			cluster.SetFinalizers([]string{clusterv1.ClusterFinalizer})
			u = incomplete(cluster)
		}
		if err := m.apply(ctx, u); err != nil {
			return err
		}
	}
	return m.apply(ctx, cluster)
}

// isComplete reports whether all objects of the Cluster were created.
func isComplete(cluster *clusterv1.Cluster) bool {
	return !metav1.HasAnnotation(cluster.ObjectMeta, incompleteAnnotation)
}

func incomplete(cluster *unstructured.Unstructured) *unstructured.Unstructured {
	out := cluster.DeepCopy()
	annotations := out.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[incompleteAnnotation] = ""
	out.SetAnnotations(annotations)
	return out
}

func (m *management) apply(ctx context.Context, u *unstructured.Unstructured) error {
	err := m.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(u.DeepCopy()), client.FieldOwner("capstan-cli"), client.ForceOwnership)
	if err != nil {
		return fmt.Errorf("cannot create %s %s: %w", u.GetKind(), u.GetName(), err)
	}
	return nil
}

// stuckAfter is the time without progress after which the blocking problem is shown.
const stuckAfter = 15 * time.Second

// waitCluster shows the progress of a cluster until it is available.
func (a *app) waitCluster(ctx context.Context, m *management, key client.ObjectKey, p *progress) error {
	defer p.close()
	var last assessment
	tick := make(chan struct{}, 1)
	timer := time.AfterFunc(stuckAfter, func() { tick <- struct{}{} })
	defer timer.Stop()
	changedAt, told := time.Now(), ""
	err := m.follow(ctx, key, tick, func(v view) (bool, error) {
		now := assess(v)
		if doneSteps(now) != doneSteps(last) {
			changedAt = time.Now()
			timer.Reset(stuckAfter)
		}
		last = now
		if len(now.blockers) > 0 && time.Since(changedAt) >= stuckAfter {
			withNote(now.steps, now.blockers[0])
			if now.blockers[0] != told {
				told = now.blockers[0]
				p.remark(told)
			}
			timer.Reset(stuckAfter)
		}
		p.show(now.steps)
		return now.done, nil
	})
	if err == nil {
		return nil
	}
	p.close()
	a.blocked(last.blockers)
	if errors.Is(err, context.DeadlineExceeded) {
		return coded{fmt.Errorf("cluster %s is not complete: %w", key.Name, err), exitTimeout}
	}
	return err
}

func doneSteps(a assessment) int {
	n := 0
	for _, s := range a.steps {
		if s.done {
			n++
		}
	}
	return n
}

// withNote sets the note of the first open step.
func withNote(steps []step, note string) {
	for i := range steps {
		if !steps[i].done {
			steps[i].note = note
			return
		}
	}
}
