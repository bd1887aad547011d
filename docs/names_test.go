package docs

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/yaml"

	bootstrapv1beta1 "capstan.dev/capstan/api/bootstrap/v1beta1"
	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1beta1 "capstan.dev/capstan/api/controlplane/v1beta1"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	infrav1beta1 "capstan.dev/capstan/api/infrastructure/v1beta1"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

var (
	fieldPath  = regexp.MustCompile(`(?:^|[\s(])(?:[A-Z]\w+\.)?((?:spec|status)\.[\w.\[\]{}]+)`)
	brackets   = regexp.MustCompile(`\[\w*\]|\{\}`)
	sourcePath = regexp.MustCompile(`(?:^|[\s(])((?:api|cmd|config|hack|internal|templates|test|tools)/[\w./{},*-]+)`)
	choice     = regexp.MustCompile(`^(.*)\{([^}]*)\}(.*)$`)
	metricName = regexp.MustCompile(`\bcapstand?_[a-z0-9_]+[a-z0-9]\b`)
	series     = regexp.MustCompile(`_(bucket|count|sum)$`)
	key        = regexp.MustCompile(`\b(?:[a-z]+\.)?capstan\.dev/[a-z][a-z0-9-]+\b`)
	heredoc    = regexp.MustCompile(`(?s)<<'?EOF'?[^\n]*\n(.*?)\n *EOF`)
	separator  = regexp.MustCompile(`(?m)^ *---\n`)
	apiVersion = regexp.MustCompile(`/v[0-9]+[a-z0-9]*$`)
)

// otherFields are fields of kinds that the schemes of Kubernetes and Cluster API do not have.
var otherFields = []string{
	"status.operationState", "status.operationState.syncResult.resources", // Application of Argo CD
	"spec.configSecret", // providers of the Cluster API operator
}

// spans returns the code in the text of the documents, by document.
func spans(t *testing.T) map[string][]string {
	t.Helper()
	out := map[string][]string{}
	for _, document := range documents(t) {
		for _, found := range inline.FindAllStringSubmatch(text(t, document), -1) {
			out[document] = append(out[document], found[1])
		}
	}
	return out
}

// kinds returns the kinds that documents mention.
func kinds(t *testing.T) *runtime.Scheme {
	t.Helper()
	kinds := runtime.NewScheme()
	if err := errors.Join(scheme.AddToScheme(kinds), apiextensionsv1.AddToScheme(kinds), clusterv1.AddToScheme(kinds), capiipamv1.AddToScheme(kinds),
		bootstrapv1.AddToScheme(kinds), bootstrapv1beta1.AddToScheme(kinds), controlplanev1.AddToScheme(kinds), controlplanev1beta1.AddToScheme(kinds),
		infrav1.AddToScheme(kinds), infrav1beta1.AddToScheme(kinds), ipamv1.AddToScheme(kinds), etcdv1.AddToScheme(kinds)); err != nil {
		t.Fatal(err)
	}
	return kinds
}

// TestFields checks that each field in the text of a document exists in a kind.
func TestFields(t *testing.T) {
	fields := map[string]bool{}
	for _, kind := range kinds(t).AllKnownTypes() {
		addFields(fields, kind, "", nil)
	}
	checked := 0
	for document, all := range spans(t) {
		for _, code := range all {
			for _, found := range fieldPath.FindAllStringSubmatch(code, -1) {
				path := strings.TrimRight(brackets.ReplaceAllString(found[1], ""), ".")
				if strings.HasSuffix(path, ".json") { // a file
					continue
				}
				if checked++; !fields[path] && !slices.Contains(otherFields, path) {
					t.Errorf("%s: expected a field of a kind, found %s", document, path)
				}
			}
		}
	}
	if checked < 300 {
		t.Errorf("found only %d fields", checked)
	}
}

// addFields adds the paths of the fields of a type. above are the types that contain it: some types contain themselves.
func addFields(fields map[string]bool, of reflect.Type, prefix string, above []reflect.Type) {
	for of.Kind() == reflect.Pointer || of.Kind() == reflect.Slice || of.Kind() == reflect.Map {
		of = of.Elem()
	}
	if of.Kind() != reflect.Struct || slices.Contains(above, of) {
		return
	}
	for field := range of.Fields() {
		name, options, _ := strings.Cut(field.Tag.Get("json"), ",")
		path := prefix + name
		if name == "" && strings.Contains(options, "inline") {
			addFields(fields, field.Type, prefix, append(above, of))
		} else if name != "" && name != "-" {
			fields[path] = true
			addFields(fields, field.Type, path+".", append(above, of))
		}
	}
}

// TestManifests checks that the objects in a document have only fields of their kind.
func TestManifests(t *testing.T) {
	kinds, checked := kinds(t), 0
	for _, document := range documents(t) {
		data, err := os.ReadFile(document)
		if err != nil {
			t.Fatal(err)
		}
		for _, manifest := range manifests(string(data)) {
			var meta metav1.TypeMeta
			if err := yaml.Unmarshal([]byte(manifest), &meta); err != nil {
				t.Errorf("%s: %v in:\n%s", document, err, manifest)
				continue
			}
			object, err := kinds.New(meta.GroupVersionKind())
			if err != nil {
				continue // a part of an object, or a kind of another project
			}
			checked++
			if err := yaml.UnmarshalStrict([]byte(manifest), object); err != nil {
				t.Errorf("%s: %v in:\n%s", document, err, manifest)
			}
		}
	}
	if checked < 50 {
		t.Errorf("found only %d objects", checked)
	}
}

// manifests returns the YAML documents in the blocks of a document, and those that its commands get as input.
func manifests(document string) (out []string) {
	for _, found := range block.FindAllStringSubmatch(document, -1) {
		var streams []string
		switch found[1] {
		case "yaml":
			streams = []string{found[2]}
		case "sh":
			for _, input := range heredoc.FindAllStringSubmatch(found[2], -1) {
				streams = append(streams, input[1])
			}
		}
		for _, stream := range streams {
			out = append(out, separator.Split(stream, -1)...)
		}
	}
	return out
}

// TestPaths checks that each path of this repository in the text of a document exists.
func TestPaths(t *testing.T) {
	checked := 0
	for document, all := range spans(t) {
		for _, code := range all {
			for _, found := range sourcePath.FindAllStringSubmatch(code, -1) {
				for _, path := range choices(strings.TrimRight(found[1], "/.,")) {
					checked++
					if !exists(filepath.Join("..", path)) && !exists(filepath.Join("..", beforeName(path))) {
						t.Errorf("%s: expected a file or folder of this repository, found %s", document, path)
					}
				}
			}
		}
	}
	if checked < 300 {
		t.Errorf("found only %d paths", checked)
	}
}

// choices returns the paths that braces stand for.
func choices(path string) (out []string) {
	found := choice.FindStringSubmatch(path)
	if found == nil {
		return []string{path}
	}
	for one := range strings.SplitSeq(found[2], ",") {
		out = append(out, choices(found[1]+one+found[3])...)
	}
	return out
}

// beforeName returns the package in package.name.
func beforeName(path string) string {
	return strings.TrimSuffix(path, filepath.Ext(path))
}

func exists(pattern string) bool {
	found, err := filepath.Glob(pattern)
	return err == nil && len(found) > 0
}

// TestMetrics checks that each metric in a document, a rule or a dashboard is in the reference of metrics.
func TestMetrics(t *testing.T) {
	reference, err := os.ReadFile("reference/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	files := documents(t)
	for _, pattern := range []string{"../config/prometheus/*.yaml", "../config/prometheus/dashboards/*"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}
	checked := 0
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range metricName.FindAllString(string(data), -1) {
			checked++
			if !strings.Contains(string(reference), "`"+name+"`") && !strings.Contains(string(reference), "`"+series.ReplaceAllString(name, "")+"`") {
				t.Errorf("%s: expected a metric of reference/metrics.md, found %s", file, name)
			}
		}
	}
	if checked < 100 {
		t.Errorf("found only %d metrics", checked)
	}
}

// TestKeys checks that each label, annotation, finalizer and class in a document is in the code.
func TestKeys(t *testing.T) {
	inCode := map[string]bool{}
	for _, root := range []string{"api", "internal", "config", "templates"} {
		err := filepath.WalkDir(filepath.Join("..", root), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || strings.HasSuffix(path, "_test.go") {
				return err
			}
			data, err := os.ReadFile(path)
			for _, name := range key.FindAllString(string(data), -1) {
				inCode[name] = true
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	checked := 0
	for _, document := range documents(t) {
		data, err := os.ReadFile(document)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range key.FindAllString(string(data), -1) {
			if checked++; !inCode[name] && !apiVersion.MatchString(name) {
				t.Errorf("%s: expected a name in the code, found %s", document, name)
			}
		}
	}
	if checked < 100 {
		t.Errorf("found only %d names", checked)
	}
}
