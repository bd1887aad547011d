package config_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	helmrelease "helm.sh/helm/v3/pkg/release"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/manifest"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
)

func helmChart(t *testing.T) *chart.Chart {
	t.Helper()
	c, err := loader.Load(filepath.Join(dist, "assets", releaseVersion, "capstan-"+strings.TrimPrefix(releaseVersion, "v")+".tgz"))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// render renders the Helm chart of the release. It returns the objects of some kinds, or all objects.
func render(t *testing.T, values map[string]any, kinds ...string) ([]*unstructured.Unstructured, error) {
	t.Helper()
	return renderChart(t, helmChart(t), values, kinds...)
}

func renderChart(t *testing.T, c *chart.Chart, values map[string]any, kinds ...string) ([]*unstructured.Unstructured, error) {
	t.Helper()
	all, err := chartutil.ToRenderValues(c, values, chartutil.ReleaseOptions{Name: "capstan", Namespace: "default", IsInstall: true}, nil)
	if err != nil {
		return nil, err
	}
	files, err := engine.Render(c, all)
	if err != nil {
		return nil, err
	}
	var objects []*unstructured.Unstructured
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if !strings.HasSuffix(name, ".yaml") {
			continue
		}
		// The parser is slow, and most of the text is CRDs.
		documents := strings.Split(files[name], "\n---\n")
		if len(kinds) > 0 {
			documents = slices.DeleteFunc(documents, func(d string) bool {
				return !slices.ContainsFunc(kinds, func(kind string) bool { return strings.Contains(d, "\nkind: "+kind+"\n") })
			})
		}
		found, err := manifest.Parse([]byte(strings.Join(documents, "\n---\n")))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		objects = append(objects, found...)
	}
	return objects, nil
}

// managers returns the Deployment of each provider in the chart.
func managers(t *testing.T, values map[string]any) []appsv1.Deployment {
	t.Helper()
	objects, err := render(t, values, "Deployment")
	if err != nil {
		t.Fatal(err)
	}
	found := ofKind[appsv1.Deployment](t, objects, "Deployment")
	if len(found) != len(kindOf) {
		t.Fatalf("the chart has %d Deployments, want one of each of the %d providers", len(found), len(kindOf))
	}
	return found
}

// Helm installs the objects that clusterctl installs. clusterctl adds its label itself, and never deletes CRDs of its own accord.
func TestChart(t *testing.T) {
	rendered, err := render(t, nil)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]*unstructured.Unstructured{}
	for _, o := range rendered {
		got[o.GetKind()+" "+o.GetName()] = o
	}
	total := 0
	for provider, objects := range providers(t) {
		total += len(objects)
		for _, want := range objects {
			labels := want.GetLabels()
			labels[clusterctlv1.ClusterctlLabel] = ""
			want.SetLabels(labels)
			if slices.Contains([]string{"CustomResourceDefinition", "Namespace"}, want.GetKind()) { // They contain clusters and credentials of hosts.
				annotations := map[string]string{"helm.sh/resource-policy": "keep"}
				maps.Copy(annotations, want.GetAnnotations())
				want.SetAnnotations(annotations)
			}
			if diff := cmp.Diff(want, got[want.GetKind()+" "+want.GetName()]); diff != "" {
				t.Errorf("%s: %s %s differs from clusterctl's:\n%s", provider, want.GetKind(), want.GetName(), diff)
			}
		}
	}
	if len(rendered) != total {
		t.Errorf("the chart has %d objects, the components have %d", len(rendered), total)
	}
}

// Each value has the effect of its description.
func TestChartValues(t *testing.T) {
	manager := func(d *appsv1.Deployment) *corev1.Container { return &d.Spec.Template.Spec.Containers[0] }
	argument := func(arg string) func(*appsv1.Deployment) bool {
		return func(d *appsv1.Deployment) bool { return slices.Contains(manager(d).Args, arg) }
	}
	for name, test := range map[string]struct {
		values map[string]any
		in     func(*appsv1.Deployment) bool
	}{
		"replicas":       {map[string]any{"replicas": 3}, func(d *appsv1.Deployment) bool { return *d.Spec.Replicas == 3 }},
		"priority class": {map[string]any{"priorityClass": "high"}, func(d *appsv1.Deployment) bool { return d.Spec.Template.Spec.PriorityClassName == "high" }},
		"no priority":    {map[string]any{"priorityClass": ""}, func(d *appsv1.Deployment) bool { return d.Spec.Template.Spec.PriorityClassName == "" }},
		"image": {
			map[string]any{"image": map[string]any{"repository": "registry.example.org:5000/mirror/manager"}},
			func(d *appsv1.Deployment) bool {
				return manager(d).Image == "registry.example.org:5000/mirror/manager:"+releaseVersion
			},
		},
		"watch filter": {map[string]any{"watchFilter": "blue"}, func(d *appsv1.Deployment) bool {
			i := slices.Index(manager(d).Args, "--watch-filter")
			return manager(d).Args[i+1] == "blue"
		}},
		"log level": {map[string]any{"logLevel": 5}, argument("--v=5")},
		"diagnostics": {map[string]any{"diagnosticsAddress": "127.0.0.1:8080", "insecureDiagnostics": true}, func(d *appsv1.Deployment) bool {
			return argument("--diagnostics-address=127.0.0.1:8080")(d) && argument("--insecure-diagnostics=true")(d)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, d := range managers(t, test.values) {
				if !test.in(&d) {
					t.Errorf("%s does not have the value", d.Name)
				}
			}
		})
	}
	t.Run("networks", func(t *testing.T) {
		found := 0
		for _, d := range managers(t, map[string]any{"machineNetworkPool": "10.8.0.0/16", "endpointPortRange": "30000-30999", "hostListenAddress": ":7444"}) {
			if argument("--machine-network-pool=10.8.0.0/16")(&d) && argument("--endpoint-port-range=30000-30999")(&d) && argument("--host-listen-address")(&d) && argument(":7444")(&d) {
				found++
			}
		}
		if found != 1 {
			t.Errorf("%d managers have the networks, want one", found)
		}
	})
	t.Run("providers", func(t *testing.T) {
		objects, err := render(t, map[string]any{"providers": map[string]any{"infrastructure": false, "controlPlane": false, "bootstrap": false}, "updatesInPlace": true})
		if err != nil {
			t.Fatal(err)
		}
		if want := len(components(t, "ipam")); len(objects) != want {
			t.Errorf("the IPAM provider alone has %d objects, want %d", len(objects), want)
		}
	})
	t.Run("updates in place", func(t *testing.T) {
		objects, err := render(t, map[string]any{"updatesInPlace": true}, "ExtensionConfig")
		if err != nil {
			t.Fatal(err)
		}
		if len(objects) != 1 {
			t.Errorf("the chart has %d ExtensionConfigs, want one", len(objects))
		}
	})
}

// Helm refuses values with a wrong name, type or form.
func TestChartRefuses(t *testing.T) {
	for name, values := range map[string]map[string]any{
		"unknown value":    {"replica": 3},
		"unknown provider": {"providers": map[string]any{"network": true}},
		"type":             {"replicas": "many"},
		"bound":            {"replicas": 100},
		"YAML in a value":  {"watchFilter": "a\"\n- --insecure-diagnostics=true"},
		"image":            {"image": map[string]any{"repository": "a b"}},
		"network":          {"machineNetworkPool": "10.0.0.0"},
		"ports":            {"endpointPortRange": "all"},
		"hosts that dial":  {"hostListenAddress": "7444 --x"},
	} {
		if _, err := render(t, values); err == nil || !strings.Contains(err.Error(), "schema") {
			t.Errorf("%s: accepted, or refused by %v", name, err)
		}
	}
}

// `helm upgrade --reuse-values` uses the defaults of the former chart. The new chart refuses it if one of its values is missing there,
// because a manager would start with an empty argument.
func TestChartNeedsAllValues(t *testing.T) {
	c := helmChart(t)
	var without func(path string, table map[string]any)
	without = func(path string, table map[string]any) {
		for name, value := range maps.Clone(table) {
			if nested, ok := value.(map[string]any); ok {
				without(path+name+".", nested)
			}
			delete(table, name)
			if _, err := renderChart(t, c, nil); err == nil || !strings.Contains(err.Error(), "schema") || !strings.Contains(err.Error(), name) {
				t.Errorf("without %s%s: accepted, or refused by %v", path, name, err)
			}
			table[name] = value
		}
	}
	without("", c.Values)
}

// Helm stores each release in a Secret of at most 1 MiB.
func TestChartFitsIntoSecret(t *testing.T) {
	c := helmChart(t)
	objects, err := render(t, map[string]any{"updatesInPlace": true})
	if err != nil {
		t.Fatal(err)
	}
	var manifest bytes.Buffer
	for _, o := range objects {
		data, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&manifest, "---\n%s\n", data)
	}
	data, err := json.Marshal(helmrelease.Release{Name: "capstan", Chart: c, Manifest: manifest.String()})
	if err != nil {
		t.Fatal(err)
	}
	var packed bytes.Buffer
	w, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	// Helm encodes the release in base64, and the Secret encodes that once more. The limit is that of the former.
	if size := base64.StdEncoding.EncodedLen(packed.Len()); size > corev1.MaxSecretSize*3/4 {
		t.Errorf("a release needs %d bytes, and must leave a quarter of %d for the future", size, corev1.MaxSecretSize)
	}
}

// foreign returns the CRDs of a module that tools/crds pins.
func foreign(t *testing.T, module, folder string) (crds []*unstructured.Unstructured) {
	t.Helper()
	in := func(args ...string) string {
		cmd := exec.Command("go", args...)
		cmd.Dir = filepath.Join(testenv.Root(), "tools", "crds")
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("go %v: %v", args, err)
		}
		return strings.TrimSpace(string(out))
	}
	in("mod", "download", module)
	files, err := filepath.Glob(filepath.Join(in("list", "-m", "-f", "{{.Dir}}", module), folder, "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no CRDs of %s: %v", module, err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		objects, err := manifest.Parse(data)
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		crds = append(crds, objects...)
	}
	return crds
}

// operatorProviders returns the objects for Cluster API Operator.
func operatorProviders(t *testing.T) []*unstructured.Unstructured {
	t.Helper()
	objects, err := manifest.Parse(asset(t, "operator-providers.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return objects
}

// Cluster API Operator reads the files of the release from its ConfigMaps.
func TestOperatorProviders(t *testing.T) {
	files := map[string]corev1.ConfigMap{}
	for _, c := range ofKind[corev1.ConfigMap](t, operatorProviders(t), "ConfigMap") {
		files[c.Namespace] = c
	}
	for provider, kind := range kindOf {
		namespace := "capstan-" + provider + "-system"
		found, ok := files[namespace]
		if !ok || found.Data["metadata"] != string(asset(t, "metadata.yaml")) || found.Data["components"] != string(asset(t, provider+"-components.yaml")) {
			t.Errorf("the ConfigMap of %s does not have the files of the release", provider)
		}
		if !slices.ContainsFunc(operatorProviders(t), func(o *unstructured.Unstructured) bool {
			version, _, _ := unstructured.NestedString(o.Object, "spec", "version")
			selector, _, _ := unstructured.NestedStringMap(o.Object, "spec", "fetchConfig", "selector", "matchLabels")
			for label, value := range selector {
				if found.Labels[label] != value {
					return false
				}
			}
			return o.GetKind() == string(kind) && o.GetNamespace() == namespace && version == found.Name && len(selector) > 0
		}) {
			t.Errorf("no %s in %s reads its ConfigMap", kind, namespace)
		}
	}
}

// With the CRDs of cert-manager and Cluster API Operator, the API server accepts the objects of both ways of installation.
func testInstallers(t *testing.T, env *testenv.Env) {
	chart, err := render(t, map[string]any{"updatesInPlace": true})
	if err != nil {
		t.Fatal(err)
	}
	objects := slices.Concat(
		foreign(t, "github.com/cert-manager/cert-manager", "deploy/crds"),
		foreign(t, "sigs.k8s.io/cluster-api-operator", "config/crd/bases"),
		chart, operatorProviders(t),
	)
	// Kinds and Namespaces come before the objects that need them, as in Helm.
	first := func(o *unstructured.Unstructured) int {
		return slices.Index([]string{"CustomResourceDefinition", "Namespace"}, o.GetKind())
	}
	slices.SortStableFunc(objects, func(a, b *unstructured.Unstructured) int { return first(b) - first(a) })
	for _, o := range objects {
		// The API server serves a new kind after a moment.
		var refused error
		if err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, expect.Patience, true, func(ctx context.Context) (bool, error) {
			refused = env.Client.Apply(ctx, client.ApplyConfigurationFromUnstructured(o), client.FieldOwner("installer"), client.ForceOwnership)
			return !meta.IsNoMatchError(refused) && !apierrors.IsNotFound(refused), nil
		}); err != nil || refused != nil {
			t.Errorf("%s %s: %v", o.GetKind(), o.GetName(), refused)
		}
	}
}
