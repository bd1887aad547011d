package v1beta2

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The node agent on the machine of etcd's leader renews this Lease and reports the state of all members. If the
// Lease is older than CareLeaseDuration, the reported states are outdated.
const (
	CareLeaseNamespace = "kube-system"
	CareLeaseName      = "etcd-care"
	// CareLeaseRenewal is the interval between renewals of the Lease.
	CareLeaseRenewal = 10 * time.Second
	// CareLeaseDuration is the validity of the reported states after the last renewal.
	CareLeaseDuration = 40 * time.Second
)

// Conditions of an EtcdMember, and their reasons.
const (
	// JoinedCondition is True for a voting member.
	JoinedCondition = "Joined"
	// VotingReason: the member is a voter.
	VotingReason = "Voting"
	// NotStartedReason: the machine's etcd is not a member yet, or has never been observed running.
	NotStartedReason = "NotStarted"
	// LearnerReason: the member is a learner. It receives the data and has no vote yet.
	LearnerReason = "Learner"
	// LeftReason: the member was removed because of spec.leave and never returns. The control plane provider may
	// delete the object.
	LeftReason = "Left"

	// HealthyCondition is True when the member answers, agrees about the leader and has no alarm. It is Unknown
	// before the first probe.
	HealthyCondition = "Healthy"
	// HealthyReason: the member is healthy.
	HealthyReason = "Healthy"
	// UnreachableReason: the member did not answer.
	UnreachableReason = "Unreachable"
	// AlarmReason: the member has raised an alarm. status.alarms contains its name.
	AlarmReason = "Alarm"
	// NoLeaderReason: the member answers but has no leader. There is no quorum.
	NoLeaderReason = "NoLeader"
	// NotProbedReason: the member was not probed yet.
	NotProbedReason = "NotProbed"

	// LeavingCondition exists after spec.leave was processed. True: the other members have a quorum without this
	// member, and it is removed as soon as its API server has stopped. False: it waits. The message contains the
	// cause.
	LeavingCondition = "Leaving"
	// ApprovedReason: the member may leave.
	ApprovedReason = "Approved"
	// QuorumAtRiskReason: the other members would have no quorum of healthy voters.
	QuorumAtRiskReason = "QuorumAtRisk"
	// MovingLeadershipReason: another member has to become leader first.
	MovingLeadershipReason = "MovingLeadership"

	// ServingCondition is False once the machine of a leaving member has stopped its API server, controller
	// manager and scheduler. The machine's own agent sets it. It does not exist before.
	ServingCondition = "Serving"
	// StoppedReason: the machine has stopped its control plane components.
	StoppedReason = "Stopped"
)

// EtcdMemberSpec is the desired state of a member. The machine and the control plane provider write it.
// +kubebuilder:validation:XValidation:rule="!oldSelf.?leave.orValue(false) || self.?leave.orValue(false)",message="leave cannot be unset: the member may already be removed. Delete the Machine, and the control plane creates another one"
type EtcdMemberSpec struct {
	// peerURL is the URL for other members: https://address:2380. The machine sets it before it requests
	// membership, and uses it to identify its own membership.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	PeerURL string `json:"peerURL,omitempty"`

	// clientURL is the URL for clients with a certificate: https://address:2379.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	ClientURL string `json:"clientURL,omitempty"`

	// leave requests the permanent removal of the member: its leadership moves to another member, and it is
	// removed once the others have a quorum without it. The control plane provider sets it before it deletes a
	// machine. It cannot be unset.
	// +optional
	Leave bool `json:"leave,omitempty"`
}

// EtcdMemberStatus is the observed state of a member. It is written only when it changes. Sizes are rounded so
// that an idle cluster writes nothing.
type EtcdMemberStatus struct {
	// conditions describe the current state: Joined, Healthy and, for a leaving member, Leaving and Serving.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=32
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// memberID is etcd's id of the member in hexadecimal. Empty before it is a member.
	// +optional
	// +kubebuilder:validation:MaxLength=16
	MemberID string `json:"memberID,omitempty"`

	// learner is true if the member has no vote yet.
	// +optional
	Learner *bool `json:"learner,omitempty"`

	// leader is true if the member is the leader.
	// +optional
	Leader *bool `json:"leader,omitempty"`

	// version is the version of etcd that the member runs.
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Version string `json:"version,omitempty"`

	// dbSizeBytes is the size of the database file in bytes, rounded up to a mebibyte.
	// +optional
	DBSizeBytes *int64 `json:"dbSizeBytes,omitempty"`

	// dbInUseBytes is the used part of the database file in bytes, rounded up to a mebibyte. Defragmentation frees
	// the rest.
	// +optional
	DBInUseBytes *int64 `json:"dbInUseBytes,omitempty"`

	// alarms are the alarms that the member has raised: NOSPACE, CORRUPT.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=16
	Alarms []string `json:"alarms,omitempty"`

	// certificatesExpire is the time when the first of the machine's control plane certificates expires, except
	// for certificate authorities. The machine's agent sets it, and renews the certificates long before.
	// +optional
	CertificatesExpire *metav1.Time `json:"certificatesExpire,omitempty"`
}

// +kubebuilder:object:root=true
// +kubebuilder:resource:path=etcdmembers,scope=Cluster,categories=capstan
// +kubebuilder:storageversion
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Joined",type="string",JSONPath=`.status.conditions[?(@.type=="Joined")].status`,description="Is a voting member"
// +kubebuilder:printcolumn:name="Healthy",type="string",JSONPath=`.status.conditions[?(@.type=="Healthy")].status`,description="Answers, agrees about the leader and has no alarm"
// +kubebuilder:printcolumn:name="Leader",type="boolean",JSONPath=".status.leader",description="Is the leader"
// +kubebuilder:printcolumn:name="Learner",type="boolean",JSONPath=".status.learner",description="Is a learner"
// +kubebuilder:printcolumn:name="Leave",type="boolean",JSONPath=".spec.leave",description="Removal requested"
// +kubebuilder:printcolumn:name="Size",type="integer",JSONPath=".status.dbSizeBytes",description="Size of the database file in bytes"
// +kubebuilder:printcolumn:name="Used",type="integer",JSONPath=".status.dbInUseBytes",description="Used part of the database file in bytes"
// +kubebuilder:printcolumn:name="Version",type="string",JSONPath=".status.version",description="etcd's version",priority=10
// +kubebuilder:printcolumn:name="ID",type="string",JSONPath=".status.memberID",description="etcd's id of the member",priority=10
// +kubebuilder:printcolumn:name="Peer",type="string",JSONPath=".spec.peerURL",description="URL for other members",priority=10
// +kubebuilder:printcolumn:name="Age",type="date",JSONPath=".metadata.creationTimestamp",description="Time since creation"

// EtcdMember is a member of the etcd of its own cluster. It has the name of the member and of the machine's Node.
// The machine creates it. The agent on the machine of etcd's leader writes its status. The control plane provider
// sets spec.leave, and deletes it after the member has left or its machine was removed.
type EtcdMember struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state of the member.
	// +required
	Spec EtcdMemberSpec `json:"spec,omitempty,omitzero"`
	// status is the observed state of the member.
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
