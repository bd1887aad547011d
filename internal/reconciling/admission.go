package reconciling

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/cluster-api/util/topology"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"
)

// Invalid is the answer of a webhook to an object: a refusal with all errors, or nil without errors.
func Invalid(gvk schema.GroupVersionKind, name string, errs field.ErrorList) error {
	if len(errs) == 0 {
		return nil
	}
	return apierrors.NewInvalid(gvk.GroupKind(), name, errs)
}

// UnchangedTemplate refuses a template that is not the same as before (ALL-10), except in a dry run of the topology controller, which
// tests the effect of a changed ClusterClass. The refusal names the path. It needs the admission request in the context.
func UnchangedTemplate(ctx context.Context, gvk schema.GroupVersionKind, template client.Object, path *field.Path, same bool) error {
	req, err := admission.RequestFromContext(ctx)
	if err != nil {
		return apierrors.NewBadRequest(fmt.Sprintf("expected an admission request in the context: %s", err))
	}
	if same || topology.IsDryRunRequest(req, template) {
		return nil
	}
	return Invalid(gvk, template.GetName(), field.ErrorList{
		field.Forbidden(path, "a template cannot be changed: create another template and reference it"),
	})
}
