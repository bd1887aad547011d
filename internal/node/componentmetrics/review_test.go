package componentmetrics

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	clienttesting "k8s.io/client-go/testing"
)

func TestReviewer(t *testing.T) {
	for name, test := range map[string]struct {
		authenticated, allowed bool
		broken                 string
		want                   error
	}{
		"reader":           {authenticated: true, allowed: true},
		"unknown token":    {allowed: true, want: ErrRefused},
		"no right":         {authenticated: true, want: ErrRefused},
		"no tokenreviews":  {authenticated: true, allowed: true, broken: "tokenreviews", want: errors.ErrUnsupported},
		"no subjectaccess": {authenticated: true, allowed: true, broken: "subjectaccessreviews", want: errors.ErrUnsupported},
	} {
		t.Run(name, func(t *testing.T) {
			client := dynamicfake.NewSimpleDynamicClient(runtime.NewScheme())
			client.PrependReactor("create", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
				asked := action.(clienttesting.CreateAction).GetObject().(*unstructured.Unstructured).DeepCopy()
				spec := asked.Object["spec"].(map[string]any)
				if action.GetResource().Resource == test.broken {
					return true, nil, errors.ErrUnsupported
				}
				if asked.GetKind() == "TokenReview" {
					if spec["token"] != "secret" {
						t.Errorf("token: %v", spec)
					}
					asked.Object["status"] = map[string]any{"authenticated": test.authenticated, "user": map[string]any{
						"username": "system:serviceaccount:a:b", "uid": "u", "groups": []any{"g"}, "extra": map[string]any{"k": []any{"v"}},
					}}
					return true, asked, nil
				}
				want := map[string]any{
					"user": "system:serviceaccount:a:b", "uid": "u", "groups": []any{"g"}, "extra": map[string]any{"k": []any{"v"}},
					"resourceAttributes": map[string]any{"verb": "get", "resource": "nodes", "subresource": "metrics", "name": "node-1"},
				}
				if diff := cmp.Diff(want, spec); diff != "" {
					t.Error(diff)
				}
				asked.Object["status"] = map[string]any{"allowed": test.allowed}
				return true, asked, nil
			})
			if err := Reviewer(client, "node-1")(t.Context(), "secret"); !errors.Is(err, test.want) {
				t.Errorf("%v, expected %v", err, test.want)
			}
		})
	}
}
