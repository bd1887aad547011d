package v1beta2

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The Lease that the agent which looks after etcd renews: it runs on the machine of etcd's leader.
// Statuses are what was, not what is, when the Lease was not renewed for CareLeaseDuration.
const (
	CareLeaseNamespace = "kube-system"
	CareLeaseName      = "etcd-care"
	// CareLeaseRenewal is how often the Lease is renewed.
	CareLeaseRenewal = 10 * time.Second
	// CareLeaseDuration is after how long without renewal statuses say nothing any more.
	CareLeaseDuration = 40 * time.Second
)

// Conditions of an EtcdMember, and their reasons.
const (
	// JoinedCondition is True for a voting member.
	JoinedCondition = "Joined"
	// VotingReason is the reason of a Joined member.
	VotingReason = "Voting"
	// NotStartedReason says that the machine's etcd is not a member yet, or was never seen running.
	NotStartedReason = "NotStarted"
	// LearnerReason says that the member is a learner: it gets the data, and has no vote yet.
	LearnerReason = "Learner"
	// LeftReason says that the member was removed as spec.leave asked; it never comes back. The control
	// plane provider may delete the object.
	LeftReason = "Left"

	// HealthyCondition is True when the member answered, agrees about the leader and has no alarm;
	// Unknown until it was asked.
	HealthyCondition = "Healthy"
	// HealthyReason is the reason of a Healthy member.
	HealthyReason = "Healthy"
	// UnreachableReason says that the member did not answer.
	UnreachableReason = "Unreachable"
	// AlarmReason says that the member has raised an alarm; status.alarms names it.
	AlarmReason = "Alarm"
	// NoLeaderReason says that the member answers and knows no leader: there is no quorum.
	NoLeaderReason = "NoLeader"
	// NotProbedReason says that nobody has asked the member yet.
	NotProbedReason = "NotProbed"

	// LeavingCondition is there once spec.leave was seen. True: the others have a quorum without the
	// member, and it is removed as soon as its API server takes no more requests. False: it has to wait,
	// the message says for what.
	LeavingCondition = "Leaving"
	// ApprovedReason says that the member may go.
	ApprovedReason = "Approved"
	// QuorumAtRiskReason says that the others would have no quorum of healthy voters.
	QuorumAtRiskReason = "QuorumAtRisk"
	// MovingLeadershipReason says that another member is to lead first.
	MovingLeadershipReason = "MovingLeadership"

	// ServingCondition is False once the machine of a member that may leave has stopped its API server,
	// controller manager and scheduler. The machine's own agent sets it; it is not there before.
	ServingCondition = "Serving"
	// StoppedReason is the reason of a machine that does not serve any more.
	StoppedReason = "Stopped"
)

// EtcdMemberSpec is what a machine and the control plane provider want of a member.
// +kubebuilder:validation:XValidation:rule="!oldSelf.?leave.orValue(false) || self.?leave.orValue(false)",message="leave cannot be taken back: the member may be gone already; delete the Machine, and the control plane makes another"
type EtcdMemberSpec struct {
	// peerURL is where other members reach this one: https://address:2380. The machine sets it before it
	// asks for membership, and knows its membership by it.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	PeerURL string `json:"peerURL,omitempty"`

	// clientURL is where clients with a certificate reach the member: https://address:2379.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	ClientURL string `json:"clientURL,omitempty"`

	// leave says that the member is to go for good: leadership moves away from it, and it is removed once
	// the others have a quorum without it. The control plane provider sets it before a machine is deleted.
	// It cannot be taken back.
	// +optional
	Leave bool `json:"leave,omitempty"`
}

// EtcdMemberStatus is what the agent that looks after etcd has seen. It is written when it changes: sizes
// are rounded so that an idle cluster writes nothing.
type EtcdMemberStatus struct {
	// conditions are Joined, Healthy and, for a member that is to go, Leaving and Serving.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=32
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// memberID is etcd's id of the member, in hexadecimal. Not set before it is a member.
	// +optional
	// +kubebuilder:validation:MaxLength=16
	MemberID string `json:"memberID,omitempty"`

	// learner says that the member has no vote yet.
	// +optional
	Learner *bool `json:"learner,omitempty"`

	// leader says that the member leads.
	// +optional
	Leader *bool `json:"leader,omitempty"`

	// version of etcd that the member runs.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Version string `json:"version,omitempty"`

	// dbSizeBytes is the size of the database file, rounded up to a mebibyte.
	// +optional
	DBSizeBytes *int64 `json:"dbSizeBytes,omitempty"`

	// dbInUseBytes is how much of it is used, rounded up to a mebibyte: the rest comes back by
	// defragmentation.
	// +optional
	DBInUseBytes *int64 `json:"dbInUseBytes,omitempty"`

	// alarms that the member has raised: NOSPACE, CORRUPT.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=16
	Alarms []string `json:"alarms,omitempty"`

	// certificatesExpire is when the first of the machine's control plane certificates expires, CAs not
	// counted. The machine's own agent tells it, and renews them long before.
	// +optional
	CertificatesExpire *metav1.Time `json:"certificatesExpire,omitempty"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=etcdmembers,scope=Cluster,categories=capstan
// +kubebuilder:storageversion
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Joined",type="string",JSONPath=`.status.conditions[?(@.type=="Joined")].status`,description="A voting member"
// +kubebuilder:printcolumn:name="Healthy",type="string",JSONPath=`.status.conditions[?(@.type=="Healthy")].status`,description="Answers, agrees and has no alarm"
// +kubebuilder:printcolumn:name="Leader",type="boolean",JSONPath=".status.leader",description="Leads"
// +kubebuilder:printcolumn:name="Learner",type="boolean",JSONPath=".status.learner",description="Has no vote yet"
// +kubebuilder:printcolumn:name="Leave",type="boolean",JSONPath=".spec.leave",description="Is to go"
// +kubebuilder:printcolumn:name="Size",type="integer",JSONPath=".status.dbSizeBytes",description="Bytes of the database file"
// +kubebuilder:printcolumn:name="Used",type="integer",JSONPath=".status.dbInUseBytes",description="Bytes of it that are used"
// +kubebuilder:printcolumn:name="Version",type="string",JSONPath=".status.version",description="etcd's version",priority=10
// +kubebuilder:printcolumn:name="ID",type="string",JSONPath=".status.memberID",description="etcd's id of the member",priority=10
// +kubebuilder:printcolumn:name="Peer",type="string",JSONPath=".spec.peerURL",description="Where other members reach it",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// EtcdMember is a member of the etcd of the cluster that it lives in. It has the name of the member and of
// the machine's Node. The machine makes it, the agent next to etcd's leader writes its status, and the control
// plane provider sets spec.leave and deletes it once the member has left or its machine is gone.
type EtcdMember struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is what is wanted of the member.
	// +required
	Spec EtcdMemberSpec `json:"spec,omitempty,omitzero"`
	// status is what was seen of the member.
	// +optional
	Status EtcdMemberStatus `json:"status,omitempty,omitzero"`
}

// GetConditions returns the conditions.
func (m *EtcdMember) GetConditions() []metav1.Condition { return m.Status.Conditions }

// SetConditions sets the conditions.
func (m *EtcdMember) SetConditions(conditions []metav1.Condition) { m.Status.Conditions = conditions }

// +kubebuilder:object:root=true

// EtcdMemberList is a list of EtcdMembers.
type EtcdMemberList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	// items are the EtcdMembers.
	Items []EtcdMember `json:"items"`
}

func init() { objectTypes = append(objectTypes, &EtcdMember{}, &EtcdMemberList{}) }
