package controlplane

import (
	"context"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
)

func TestParseManifest(t *testing.T) {
	const ok = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n"
	for name, c := range map[string]struct{ text, want string }{
		"one":           {ok, ""},
		"two":           {ok + "---\n" + ok + "---\n", ""},
		"nothing":       {"---\n", "found 0"},
		"no YAML":       {"{hunter2", "cannot be read"},
		"no object":     {"hunter2", "cannot be read"},
		"no kind":       {"apiVersion: v1\nmetadata: {name: hunter2}\n", "cannot be read"},
		"no version":    {"kind: Pod\nmetadata: {name: hunter2}\n", "expected one object with apiVersion"},
		"no name":       {ok + "---\napiVersion: v1\nkind: Pod\nmetadata: {generateName: a}\n", "object 2 (Pod): expected metadata.name"},
		"a list":        {"apiVersion: v1\nkind: List\nitems: []\n", "documents of their own"},
		"many":          {strings.Repeat(ok+"---\n", maxManifestObjects+1), "expected 1 to 200 objects, found 201"},
		"not too many":  {strings.Repeat(ok+"---\n", maxManifestObjects), ""},
		"a broken part": {ok + "---\n{", "cannot be read"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parseManifest([]byte(c.text))
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if err != nil && strings.Contains(err.Error(), "hunter2") {
				t.Errorf("the error quotes the manifest: %v", err)
			}
		})
	}
}

// TestManifests: each manifest is applied once. A condition names the obstacle, and the next try continues after it.
func TestManifests(t *testing.T) {
	ctx, namespace := t.Context(), env.Namespace(t)
	cleanRecord := func() {
		record := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: manifestRecord}}
		if err := env.Client.Delete(context.WithoutCancel(ctx), record); client.IgnoreNotFound(err) != nil {
			t.Fatal(err)
		}
	}
	cleanRecord()
	t.Cleanup(cleanRecord)
	object := func(name, data string) string {
		return "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: " + name + ", namespace: " + namespace + "}\n" + data + "---\n"
	}
	cp := initializedFor(time.Minute)
	cp.Namespace = namespace
	cp.Spec.Manifests = []controlplanev1.Manifest{
		{Name: "first", Content: object("one", "") + object("two", "data: {a: b}\n")},
		{Name: "second", ContentFrom: bootstrapv1.ContentSource{Secret: bootstrapv1.SecretKeyReference{Name: "source", Key: "objects"}}},
		{Name: "third", ContentFrom: bootstrapv1.ContentSource{ConfigMap: bootstrapv1.ConfigMapKeyReference{Name: "source", Key: "objects"}}},
	}
	s := &scope{ControlPlane: &model.ControlPlane{Object: cp, Workload: &model.Workload{}, Now: time.Now()}}
	r := &userManifests{clients: &clients{Client: env.Client}}
	exists := func(name string) bool {
		err := env.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, &corev1.ConfigMap{})
		if client.IgnoreNotFound(err) != nil {
			t.Fatal(err)
		}
		return !apierrors.IsNotFound(err)
	}
	expect := func(status metav1.ConditionStatus, want string) {
		t.Helper()
		out, err := r.reconcile(ctx, s)
		if err != nil {
			t.Fatal(err)
		}
		c := conditions.Get(cp, controlplanev1.ManifestsAppliedCondition)
		if c == nil || c.Status != status || !strings.Contains(c.Message, want) || strings.Contains(c.Message, "hunter2") {
			t.Errorf("%+v, want %s with %q", c, status, want)
		}
		if retries := out.requeueAfter > 0; retries != (status == metav1.ConditionFalse && s.client != nil) {
			t.Errorf("tries again after %s", out.requeueAfter)
		}
	}
	create := func(o client.Object) {
		t.Helper()
		if err := env.Client.Create(ctx, o); err != nil {
			t.Fatal(err)
		}
	}
	expect(metav1.ConditionFalse, "as soon as there is a connection")
	s.client = env.Client
	expect(metav1.ConditionFalse, "manifest second: the Secret source does not exist")
	if !exists("one") || !exists("two") {
		t.Error("the first manifest was not applied before the obstacle")
	}
	if err := env.Client.Delete(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "one"}}); err != nil {
		t.Fatal(err)
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "source"}, StringData: map[string]string{"objects": object("three", "data: hunter2\n")}}
	create(secret)
	expect(metav1.ConditionFalse, "manifest second: ConfigMap "+namespace+"/three: the API server refuses it with the reason")
	secret.StringData = map[string]string{"objects": object("three", "data: {a: hunter2}\n")}
	if err := env.Client.Update(ctx, secret); err != nil {
		t.Fatal(err)
	}
	expect(metav1.ConditionFalse, "manifest third: the ConfigMap source does not exist")
	source := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "source"}, Data: map[string]string{
		"objects": "apiVersion: example.com/v1\nkind: Nonsense\nmetadata: {name: a}\n",
	}}
	create(source)
	expect(metav1.ConditionFalse, "manifest third: Nonsense /a: the cluster has no kind Nonsense of example.com/v1 yet")
	source.Data["objects"] = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: of-manifest}\n"
	if err := env.Client.Update(ctx, source); err != nil {
		t.Fatal(err)
	}
	expect(metav1.ConditionTrue, "")
	inDefault := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "of-manifest"}}
	if err := env.Client.Delete(ctx, inDefault); err != nil {
		t.Errorf("an object without a namespace: %v", err)
	}
	if exists("one") || !exists("three") {
		t.Error("a manifest was applied twice, or not at all")
	}
	// Another manager has no memory, and the cluster has the record.
	r = &userManifests{clients: r.clients}
	expect(metav1.ConditionTrue, "")
	if exists("one") {
		t.Error("another manager applied a manifest again")
	}
	cp.Spec.Manifests = append(cp.Spec.Manifests, controlplanev1.Manifest{Name: "fourth", Content: object("four", "")})
	expect(metav1.ConditionTrue, "")
	if !exists("four") || exists("one") {
		t.Error("a new manifest was not applied, or an applied one was")
	}
	cp.Generation++ // Another field of the spec changes.
	expect(metav1.ConditionTrue, "")
	if c := conditions.Get(cp, controlplanev1.ManifestsAppliedCondition); c.ObservedGeneration != cp.Generation {
		t.Errorf("the condition is about generation %d of %d", c.ObservedGeneration, cp.Generation)
	}
	cp.Spec.Manifests = nil
	if _, err := r.reconcile(ctx, s); err != nil || conditions.Get(cp, controlplanev1.ManifestsAppliedCondition) != nil {
		t.Errorf("the condition remains without manifests: %v", err)
	}
}
