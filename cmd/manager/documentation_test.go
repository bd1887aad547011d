package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
)

// foreignKinds are kinds in examples whose definitions this test does not install. make test-flux and make test-argocd apply the
// examples of Flux and Argo CD to the real programs.
var foreignKinds = []string{
	"Kustomization.kustomize.toolkit.fluxcd.io", "Application.argoproj.io", "HelmChartProxy.addons.cluster.x-k8s.io",
	"EncryptionConfiguration.apiserver.config.k8s.io", // a file of the API server
}

// yamlBlock matches the YAML of a document: a block of YAML, or the input of a command in a shell block.
var yamlBlock = regexp.MustCompile("(?ms)^ *```yaml\n(.*?\n) *```|<<'?(?:YAML|EOF)'?\n(.*?\n) *(?:YAML|EOF)$")

// example is an object in a document.
type example struct {
	document string
	*unstructured.Unstructured
}

func (e example) String() string {
	return fmt.Sprintf("%s: %s %s", e.document, e.GetKind(), e.GetName())
}

// fragment reports whether the example shows only some fields of an object: it has no name, or a shell completes it.
func (e example) fragment() bool {
	text, err := e.MarshalJSON()
	return e.GetName() == "" || err != nil || bytes.Contains(text, []byte("$("))
}

// examples returns the objects in the documents of the project. Each YAML block must be valid YAML.
func examples(t *testing.T) (all []example) {
	t.Helper()
	var documents []string
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/decisions/*.md"} {
		found, err := filepath.Glob(filepath.Join(testenv.Root(), pattern))
		if err != nil {
			t.Fatal(err)
		}
		documents = append(documents, found...)
	}
	for _, document := range documents {
		data, err := os.ReadFile(document)
		if err != nil {
			t.Fatal(err)
		}
		for _, block := range yamlBlock.FindAllSubmatch(data, -1) {
			objects, err := parse(slices.Concat(block[1], block[2]))
			if err != nil {
				t.Errorf("%s: %v, in:\n%s%s", document, err, block[1], block[2])
			}
			for _, o := range objects {
				all = append(all, example{filepath.Base(document), o})
			}
		}
	}
	return all
}

// parse returns the objects of a YAML stream. A document without kind and version is not of an API, for example a configuration
// file. A part of an object needs both, or no test would read it.
func parse(data []byte) (all []*unstructured.Unstructured, err error) {
	for decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), 4096); ; {
		content := map[string]any{}
		if err := decoder.Decode(&content); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		o := &unstructured.Unstructured{Object: content}
		_, hasSpec := content["spec"]
		switch {
		case o.GetKind() != "" && o.GetAPIVersion() != "":
			all = append(all, o)
		case o.GetKind() != "" || o.GetAPIVersion() != "" || hasSpec:
			return nil, errors.New("expected apiVersion and kind of an object, found a part of it")
		}
	}
}

// TestExamplesOfDocuments applies each complete object of the documents in server-side dry run, with the definitions of
// Capstan and of Cluster API, and with all webhooks of Capstan. Examples without a name show some fields of an object: they
// must contain no unknown field.
func TestExamplesOfDocuments(t *testing.T) {
	all := examples(t)
	w := sharedEnvironment(t, allWebhooks...)
	w.run(w.env.WebhookFlags()...)
	applied, fragments := 0, 0
	for _, e := range all {
		kind := e.GroupVersionKind().GroupKind()
		if slices.Contains(foreignKinds, kind.String()) {
			continue
		}
		w.place(e)
		if e.fragment() {
			fragments++
			err := w.env.Client.Create(t.Context(), e.withName(), client.DryRunAll, client.FieldValidation(metav1.FieldValidationStrict))
			if err != nil && strings.Contains(err.Error(), "unknown field") {
				t.Errorf("%s: %v", e, err)
			}
			continue
		}
		applied++
		if err := w.dryRun(e); err != nil {
			t.Errorf("%s: %v", e, err)
		}
	}
	t.Logf("%d objects applied, %d fragments checked for unknown fields", applied, fragments)
	if applied < 20 || fragments < 15 {
		t.Errorf("found only %d objects and %d fragments", applied, fragments)
	}
}

// dryRun applies an example. It repeats a request that failed because a webhook did not answer: the manager serves the
// webhooks some time after its start, and answers late on a busy machine.
func (w *environment) dryRun(e example) (err error) {
	w.t.Helper()
	w.Eventually(func() error {
		err = w.env.Client.Apply(w.t.Context(), client.ApplyConfigurationFromUnstructured(e.DeepCopy()), client.FieldOwner("reader"), client.ForceOwnership, client.DryRunAll)
		if apierrors.IsInternalError(err) {
			return err
		}
		return nil
	}, expect.Patience).Should(Succeed(), "%s", e)
	return err
}

// place gives an object of a namespaced kind a namespace that exists.
func (w *environment) place(e example) {
	w.t.Helper()
	gvk := e.GroupVersionKind()
	mapping, err := w.env.Client.RESTMapper().RESTMapping(gvk.GroupKind(), gvk.Version)
	if err != nil {
		w.t.Errorf("%s: %v: add the kind to foreignKinds if no test has its definition", e, err)
		return
	}
	if mapping.Scope.Name() != meta.RESTScopeNameNamespace {
		return
	}
	if e.GetNamespace() == "" {
		e.SetNamespace(metav1.NamespaceDefault)
	}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: e.GetNamespace()}}
	if err := w.env.Client.Create(w.t.Context(), namespace); err != nil && !apierrors.IsAlreadyExists(err) {
		w.t.Errorf("%s: %v", e, err)
	}
}

// withName returns a copy of the object with a name.
func (e example) withName() *unstructured.Unstructured {
	o := e.DeepCopy()
	if o.GetName() == "" {
		o.SetName("example")
	}
	return o
}
