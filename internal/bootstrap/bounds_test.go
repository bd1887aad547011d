package bootstrap

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

// The content that a spec references, each time that it does, is not larger than the Secret that it becomes.
func TestReferencesAreBounded(t *testing.T) {
	large := func(name string, size int) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}, Data: map[string]string{"x": strings.Repeat("x", size)}}
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "secret"}, Data: map[string][]byte{"x": make([]byte, 700<<10)}}
	c := fake.NewClientBuilder().WithObjects(large("whole", 1<<20), large("large", 700<<10), large("half", 512<<10), secret).Build()
	r := &Reconciler{Client: c}
	for name, tc := range map[string]struct {
		files   []string
		refused bool
	}{
		"one megabyte":       {files: []string{"whole"}},
		"half of it twice":   {files: []string{"half", "half"}},
		"twice":              {files: []string{"large", "large"}, refused: true},
		"two":                {files: []string{"whole", "half"}, refused: true},
		"a Secret":           {files: []string{"secret"}},
		"a Secret and a map": {files: []string{"secret", "half"}, refused: true},
	} {
		t.Run(name, func(t *testing.T) {
			spec := bootstrapv1.CapstanConfigSpec{}
			for i, of := range tc.files {
				f := bootstrapv1.File{Path: fmt.Sprintf("/etc/%d", i)}
				f.ContentFrom.ConfigMap = bootstrapv1.ConfigMapKeyReference{Name: of, Key: "x"}
				if of == "secret" {
					f.ContentFrom = bootstrapv1.ContentSource{Secret: bootstrapv1.SecretKeyReference{Name: of, Key: "x"}}
				}
				spec.Files = append(spec.Files, f)
			}
			_, _, err := r.references(t.Context(), "ns", spec)
			if n, ok := errors.AsType[*notYet](err); ok != tc.refused || ok && (!n.unseen || n.reason != bootstrapv1.InvalidConfigReason) || err != nil && !ok {
				t.Errorf("found %v, expected a refusal: %v", err, tc.refused)
			}
		})
	}
}

// A document whose aliases would need gigabytes is refused at admission, and not decoded.
func TestDocumentWithAliases(t *testing.T) {
	text := "apiVersion: audit.k8s.io/v1\nkind: Policy\n"
	check := func(content string) int {
		return len(validateDocument(bootstrapv1.Document{Content: content}, "audit.k8s.io", "Policy", field.NewPath("x")))
	}
	if check(text+"a: &a x\nb: *a\n") != 0 {
		t.Error("one alias is refused")
	}
	if check(text+"a: &a "+strings.Repeat("x", 4000)+"\nb: ["+strings.Repeat("*a, ", 2500)+"]\n") == 0 {
		t.Error("aliases for 10 MB are accepted")
	}
}
