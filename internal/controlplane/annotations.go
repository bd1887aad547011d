package controlplane

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// annotator writes the annotations of control planes: the records that a move of the cluster must not lose.
type annotator struct{ *clients }

// annotate writes an annotation of the control plane; "" removes it.
func (r *annotator) annotate(ctx context.Context, s *scope, name, value string) error {
	if s.Object.Annotations[name] == value {
		return nil
	}
	before := s.Object.DeepCopy()
	if value == "" {
		delete(s.Object.Annotations, name)
	} else {
		metav1.SetMetaDataAnnotation(&s.Object.ObjectMeta, name, value)
	}
	// The answer is stored in a copy, because its status is older than the status of this reconciliation.
	return client.IgnoreNotFound(r.Client.Patch(ctx, s.Object.DeepCopy(), client.MergeFrom(before)))
}

// finishRemediation removes the record from the control plane: the replacement has it now.
func (r *annotator) finishRemediation(ctx context.Context, s *scope) error {
	return r.annotate(ctx, s, controlplanev1.RemediationInProgressAnnotation, s.OpenRemediation().String())
}
