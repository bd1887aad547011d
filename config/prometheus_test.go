package config_test

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/manifest"
	"capstan.dev/capstan/internal/testenv"
)

var (
	metricName = regexp.MustCompile(`\bcapstand?_[a-z0-9_]+\b`)
	// declaredLabels matches the labels in the declaration of a metric: as a list, or as the last arguments of desc.
	declaredLabels = regexp.MustCompile(`\[\]string\{([^}]*)\}|^, "[^"]*"((?:, "[a-z]+")+)\)`)
	quoted         = regexp.MustCompile(`"[a-z_]+"`)
	// suffix is what Prometheus adds to the name of a histogram.
	suffix = regexp.MustCompile(`_(bucket|sum|count)$`)
)

// metricsIn returns the names of metrics in a text, sorted.
func metricsIn(text string) []string {
	names := metricName.FindAllString(text, -1)
	for i, name := range names {
		if base := suffix.ReplaceAllString(name, ""); strings.HasSuffix(name, "_bucket") {
			names[i] = base
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func readText(t *testing.T, path ...string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(append([]string{testenv.Root()}, path...)...))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// metricsOfCode returns the names of all metrics that the programs define, and the labels of those that are declared with them.
func metricsOfCode(t *testing.T) (names []string, labels map[string][]string) {
	t.Helper()
	literal := regexp.MustCompile(`"capstand?_[a-z0-9_]+[a-z0-9]"`)
	labels = map[string][]string{}
	err := filepath.WalkDir(filepath.Join(testenv.Root(), "internal"), func(path string, _ os.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		data, err := os.ReadFile(path)
		found := literal.FindAllIndex(data, -1)
		for i, at := range found {
			name, end := strings.Trim(string(data[at[0]:at[1]]), `"`), len(data)
			if i+1 < len(found) {
				end = found[i+1][0]
			}
			names = append(names, name)
			declaration, _, _ := strings.Cut(string(data[at[1]:end]), "\n\n")
			if list := declaredLabels.FindStringSubmatch(declaration); list != nil {
				labels[name] = quoted.FindAllString(list[1]+list[2], -1)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(names)
	return slices.Compact(names), labels
}

// TestMetricsReference: the generated page lists each metric of the code with its labels, and no other. docs/metrics.md names no others.
func TestMetricsReference(t *testing.T) {
	page := readText(t, "docs", "reference", "metrics.md")
	code, labels := metricsOfCode(t)
	listed := metricsIn(page)
	if len(code) < 20 {
		t.Fatalf("found %d metrics in the code", len(code))
	}
	if !slices.Equal(code, listed) {
		t.Errorf("metrics of the code:\n%v\nmetrics of docs/reference/metrics.md:\n%v", code, listed)
	}
	for _, name := range metricsIn(readText(t, "docs", "metrics.md")) {
		if !slices.Contains(code, name) && !strings.HasSuffix(name, "_") {
			t.Errorf("docs/metrics.md names %s, which does not exist", name)
		}
	}
	// Lists in variables are not followed. Constant labels come before the declared ones.
	compared := 0
	for line := range strings.Lines(page) {
		cells := strings.Split(line, "|")
		for _, name := range metricsIn(cells[min(1, len(cells)-1)]) {
			want, declared := labels[name]
			if !declared || len(cells) != 6 {
				continue
			}
			compared++
			if found := strings.ReplaceAll(strings.TrimSpace(cells[3]), "`", `"`); !strings.HasSuffix(found, strings.Join(want, ", ")) {
				t.Errorf("%s has the labels %v, docs/reference/metrics.md lists %s", name, want, found)
			}
		}
	}
	if compared < len(labels) || compared < 15 {
		t.Errorf("compared the labels of only %d metrics of %d", compared, len(labels))
	}
}

// alert is an alert of rules.yaml.
type alert struct {
	Alert, Expr         string
	Labels, Annotations map[string]string
}

func alertsOfRules(t *testing.T) (all []alert) {
	t.Helper()
	var rules struct {
		Spec struct{ Groups []struct{ Rules []alert } }
	}
	if err := yaml.Unmarshal([]byte(readText(t, "config", "prometheus", "rules.yaml")), &rules); err != nil {
		t.Fatal(err)
	}
	for _, group := range rules.Spec.Groups {
		all = append(all, group.Rules...)
	}
	if len(all) < 10 {
		t.Fatalf("found %d alerts", len(all))
	}
	return all
}

// testedAlerts returns the names of the alerts that rules_test.yaml expects to fire, and of those that it expects to be silent.
func testedAlerts(t *testing.T) (firing, silent map[string]bool) {
	t.Helper()
	var tests struct {
		Tests []struct {
			Cases []struct {
				Name     string            `json:"alertname"`
				Expected []json.RawMessage `json:"exp_alerts"`
			} `json:"alert_rule_test"`
		}
	}
	if err := yaml.Unmarshal([]byte(readText(t, "config", "prometheus", "rules_test.yaml")), &tests); err != nil {
		t.Fatal(err)
	}
	firing, silent = map[string]bool{}, map[string]bool{}
	for _, test := range tests.Tests {
		for _, c := range test.Cases {
			if len(c.Expected) > 0 {
				firing[c.Name] = true
			} else {
				silent[c.Name] = true
			}
		}
	}
	return firing, silent
}

// runbooks is the placeholder for the address of docs/troubleshooting.md.
const runbooks = "https://capstan.example/docs/troubleshooting.md"

// TestAlerts: alerts use existing metrics, have a severity, and link to an existing section. docs/metrics.md lists them, and
// rules_test.yaml has a case in which each fires, and one in which it is silent.
func TestAlerts(t *testing.T) {
	code, _ := metricsOfCode(t)
	reference := readText(t, "docs", "metrics.md")
	headings := strings.ToLower(strings.ReplaceAll(readText(t, "docs", "troubleshooting.md"), " ", "-"))
	firing, silent := testedAlerts(t)
	for _, r := range alertsOfRules(t) {
		used := metricsIn(r.Expr)
		for _, name := range used {
			if !slices.Contains(code, name) {
				t.Errorf("%s uses %s, which does not exist", r.Alert, name)
			}
		}
		section, found := strings.CutPrefix(r.Annotations["runbook_url"], runbooks+"#")
		if len(used) == 0 || r.Labels["severity"] == "" || r.Annotations["description"] == "" || !found || !strings.Contains(headings, "\n##-"+section+"\n") {
			t.Errorf("%s: want a metric, a severity, a description and a section of docs/troubleshooting.md, found %v", r.Alert, r)
		}
		if !strings.Contains(reference, "| `"+r.Alert+"` | "+r.Labels["severity"]+" |") || !strings.Contains(reference, "troubleshooting.md#"+section) {
			t.Errorf("docs/metrics.md does not list %s with its severity and section", r.Alert)
		}
		if !firing[r.Alert] || !silent[r.Alert] {
			t.Errorf("rules_test.yaml: want a case in which %s fires and one in which it is silent, found %t and %t", r.Alert, firing[r.Alert], silent[r.Alert])
		}
	}
}

// TestDashboards: each panel uses existing metrics, and the kustomization contains each dashboard.
func TestDashboards(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(testenv.Root(), "config", "prometheus", "dashboards", "*.json"))
	if err != nil || len(files) < 3 {
		t.Fatalf("dashboards %v, %v", files, err)
	}
	code, _ := metricsOfCode(t)
	kustomization := readText(t, "config", "prometheus", "kustomization.yaml")
	for _, file := range files {
		var dashboard struct {
			UID    string
			Panels []struct {
				Title   string
				Targets []struct{ Expr string }
			}
		}
		data, err := os.ReadFile(file)
		if err == nil {
			err = json.Unmarshal(data, &dashboard)
		}
		if err != nil || dashboard.UID+".json" != filepath.Base(file) || !strings.Contains(kustomization, filepath.Base(file)) {
			t.Errorf("%s: uid %q, %v", file, dashboard.UID, err)
		}
		for _, p := range dashboard.Panels {
			for _, target := range p.Targets {
				used := metricsIn(target.Expr)
				if len(used) == 0 || slices.ContainsFunc(used, func(name string) bool { return !slices.Contains(code, name) }) {
					t.Errorf("%s, %s: metrics %v", file, p.Title, used)
				}
			}
		}
	}
}

// built returns the objects of the release's config/prometheus. The placeholder for the address of the runbooks is replaced.
func built(t *testing.T, address string) []*unstructured.Unstructured {
	t.Helper()
	release := t.TempDir()
	archive := filepath.Join(dist, "assets", releaseVersion, "capstan-prometheus.tar.gz")
	if out, err := exec.Command("tar", "-C", release, "-xzf", archive).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	folder := filepath.Join(release, "config", "prometheus")
	file := filepath.Join(folder, "kustomization.yaml")
	text := strings.Replace(readText(t, "config", "prometheus", "kustomization.yaml"), runbooks, address, 1)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	programs, err := testenv.Assets()
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(filepath.Join(programs, "kubectl"), "kustomize", folder).CombinedOutput()
	if err != nil {
		t.Fatalf("kubectl kustomize: %v: %s", err, out)
	}
	objects, err := manifest.Parse(out)
	if err != nil {
		t.Fatal(err)
	}
	return objects
}

// TestPrometheusKustomization: with the files of a release, `kubectl apply --kustomize config/prometheus` gives each alert the address of
// the runbooks that the kustomization contains, and the PodMonitor selects the pods and the port of each manager.
func TestPrometheusKustomization(t *testing.T) {
	const address = "https://wiki.example.org/capstan"
	kinds := map[string]*unstructured.Unstructured{}
	for _, o := range built(t, address) {
		if o.GetName() == "capstan-runbooks" {
			t.Error("the ConfigMap with the address of the runbooks is not local to the kustomization")
		}
		kinds[o.GetKind()] = o
	}
	rules := decoded[struct {
		metav1.TypeMeta
		metav1.ObjectMeta `json:"metadata"`
		Spec              struct {
			Groups []struct {
				Name  string
				Rules []struct {
					Alert, Expr, For    string
					Labels, Annotations map[string]string
				}
			}
		}
	}](t, kinds["PrometheusRule"])
	alerts := alertsOfRules(t)
	for i, r := range rules.Spec.Groups[0].Rules {
		want := strings.Replace(alerts[i].Annotations["runbook_url"], runbooks, address, 1)
		if found := r.Annotations["runbook_url"]; found != want || !strings.HasPrefix(found, address+"#") {
			t.Errorf("%s: runbook_url %q, want %q", r.Alert, found, want)
		}
	}
	if len(rules.Spec.Groups[0].Rules) != len(alerts) {
		t.Errorf("%d alerts of %d", len(rules.Spec.Groups[0].Rules), len(alerts))
	}
	checkPodMonitor(t, kinds["PodMonitor"])
}

// decoded returns an object of the Prometheus operator as a type with the fields that Capstan uses. Other fields are an error.
func decoded[T any](t *testing.T, o *unstructured.Unstructured) (into T) {
	t.Helper()
	data, err := o.MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&into); err != nil {
		t.Fatalf("%s %s: %v", o.GetKind(), o.GetName(), err)
	}
	return into
}

func checkPodMonitor(t *testing.T, object *unstructured.Unstructured) {
	t.Helper()
	monitor := decoded[struct {
		metav1.TypeMeta
		metav1.ObjectMeta `json:"metadata"`
		Spec              struct {
			NamespaceSelector   struct{ MatchNames []string }
			Selector            metav1.LabelSelector
			PodMetricsEndpoints []struct {
				Port, Scheme      string
				BearerTokenSecret corev1.SecretKeySelector
				TLSConfig         struct{ InsecureSkipVerify bool }
			}
		}
	}](t, object)
	selector, err := metav1.LabelSelectorAsSelector(&monitor.Spec.Selector)
	if err != nil {
		t.Fatal(err)
	}
	for provider, objects := range providers(t) {
		for _, d := range ofKind[appsv1.Deployment](t, objects, "Deployment") {
			scraped := slices.ContainsFunc(d.Spec.Template.Spec.Containers[0].Ports, func(p corev1.ContainerPort) bool {
				return p.Name == monitor.Spec.PodMetricsEndpoints[0].Port
			})
			if !scraped || !slices.Contains(monitor.Spec.NamespaceSelector.MatchNames, d.Namespace) || !selector.Matches(labels.Set(d.Spec.Template.Labels)) {
				t.Errorf("%s: the PodMonitor does not select Deployment %s/%s", provider, d.Namespace, d.Name)
			}
		}
	}
}
